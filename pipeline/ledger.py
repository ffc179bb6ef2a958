"""What is finished: one commit record a shard, written last, and ``run.json`` that says how all of them were made.

Only what a commit record names counts, for resume, index, search and verify. A record counts only while its output file
is there with the recorded size, and only for the input and the configuration it was made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, TypeGuard

from pipeline.errors import ConfigError, OutputError
from pipeline.records import PARTS, Shard, commit_name
from pipeline.shards import natural_key
from pipeline.storage import Storage, open_output

RUN_FILE = "run.json"
VERSION = 1
READS_AT_ONCE = 8  # an object store answers in tens of milliseconds
COMMIT_ATTEMPTS = 3


def fingerprint(fields: Mapping[str, Any]) -> str:
    """Hash of all that changes a vector; equal fingerprints mean one vector space."""
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:32]


class Ledger:
    """The records below ``OUTPUT/commits``."""

    def __init__(self, output: str | Storage) -> None:
        self.output = open_output(output) if isinstance(output, str) else output

    def record(self, key: str, part: int | None = None) -> dict[str, Any] | None:
        """The commit record of a shard or of a part, or None when there is none to be trusted."""
        record = self.output.read_json(commit_name(key, part))
        if not isinstance(record, dict) or record.get("version") != VERSION:
            return None
        return record if self._outputs_present(record) else None

    def _outputs_present(self, record: dict[str, Any]) -> bool:
        parts = [record["output"], *([record["quarantine"]] if record.get("quarantine") else [])]
        return all(self.output.size(part["path"]) == part["bytes"] for part in parts)

    def commits(self) -> list[dict[str, Any]]:
        """All records that count, in natural order of their keys."""
        return [record for record in self._records((key, None) for key in self.keys()) if record is not None]

    def _records(self, which: Iterable[tuple[str, int | None]]) -> list[dict[str, Any] | None]:
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            return list(pool.map(lambda key_and_part: self.record(*key_and_part), which))

    def keys(self) -> list[str]:
        names = self.output.files("commits", ".json")
        return sorted((name[len("commits/") : -len(".json")] for name in names), key=natural_key)

    def unfinished(self, shards: Iterable[Shard], run_fingerprint: str) -> list[Shard]:
        """Those that are still to be done, in order; before each large one its parts that are."""
        return [
            unit
            for shard in self._not_done(shards, run_fingerprint)
            for unit in [*self._not_done(parts_of(shard), run_fingerprint), shard]
        ]

    def _not_done(self, units: Iterable[Shard], run_fingerprint: str) -> list[Shard]:
        units = list(units)
        records = self._records((unit.key, unit.part_number) for unit in units)
        pairs = zip(units, records, strict=True)
        return [unit for unit, record in pairs if not is_of(record, unit, run_fingerprint)]

    def sweep_parts(self, wanted: Iterable[str]) -> None:
        """Remove the parts of all shards but those of the keys ``wanted``."""
        kept = set(wanted)
        names = self.output.files(PARTS, "")
        for key in {name[len(PARTS) + 1 :].rpartition("/")[0] for name in names} - kept:
            self.output.remove_tree(f"{PARTS}/{key}")

    def is_done(self, shard: Shard, run_fingerprint: str) -> bool:
        return is_of(self.record(shard.key), shard, run_fingerprint)

    def commit(self, record: dict[str, Any]) -> dict[str, Any]:
        """Make a finished shard count; returns the record that does.

        That is another writer's where one was first, which only an object store allows: it names the same bytes.

        Raises:
            OutputError: another writer has made something else of the shard in the meantime.
        """
        part = record["shard"].get("part")
        name = commit_name(record["shard"]["key"], part["number"] if part else None)
        for _ in range(COMMIT_ATTEMPTS):
            if self.output.create_json(name, {"version": VERSION, **record}):
                return record
            other = self.output.read_json(name)
            if isinstance(other, dict):  # otherwise taken back by its writer, who makes the shard again
                if _same_work(other, record):
                    return other
                self.output.remove(name)  # whose files lie there now is unknown: no record may speak for them
                break
        raise OutputError(
            f"{self.output.location(name)}: another run wrote this shard at the same time, and not the same; "
            "let one run at a time write here, then run again"
        )

    def remove(self, key: str) -> None:
        """Take a shard out of the output: its record first, then its files."""
        self.forget(key)
        for folder in ("embeddings", "reuse", "quarantine"):
            self.output.remove(f"{folder}/{key}.parquet")

    def forget(self, key: str, part: int | None = None) -> None:
        """Take a record back before its output is replaced, so that the two never disagree."""
        self.output.remove(commit_name(key, part))


def is_of(record: dict[str, Any] | None, shard: Shard, run_fingerprint: str) -> TypeGuard[dict[str, Any]]:
    """Whether a record, if any, is of this input and this configuration."""
    return record is not None and record["fingerprint"] == run_fingerprint and same_input(record["shard"], shard)


def _same_work(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records say the same of the same input, wherever each was made."""

    def said(record: Mapping[str, Any]) -> list[Any]:
        sums = [(record.get(part) or {}).get("sha256") for part in ("output", "quarantine", "reuse")]
        return [record.get("fingerprint"), {**record["shard"], "path": None}, sums]

    return said(one) == said(other)


def parts_of(shard: Shard) -> list[Shard]:
    return [replace(shard, part=part) for part in shard.parts]


def same_input(recorded: Mapping[str, Any], shard: Shard) -> bool:
    """Size and modification time, not the path: a moved input folder is still the same input.

    An object store's etag, where both have one, stands in for the time, which counts only seconds there.
    """
    if recorded["size_bytes"] != shard.size_bytes or recorded.get("part") != (shard.part and asdict(shard.part)):
        return False
    if recorded.get("etag") and shard.etag:
        return bool(recorded["etag"] == shard.etag)
    return bool(recorded["mtime_ns"] == shard.mtime_ns)


def read_run(output: str | Storage) -> dict[str, Any]:
    """The content of ``run.json``.

    Raises:
        ConfigError: the folder holds no run.
    """
    place = open_output(output) if isinstance(output, str) else output
    document = place.read_json(RUN_FILE)
    if not isinstance(document, dict) and place.size(RUN_FILE) is not None:
        raise ConfigError(f"{place.root}/{RUN_FILE}: cannot be read; run the same command again to rewrite it")
    if not isinstance(document, dict):
        raise ConfigError(f"{place.root}: no {RUN_FILE} here; expected the --output folder of 'embed-corpus run'")
    return document


def start_run(
    output: Storage,
    fields: Mapping[str, Any],
    layout: Mapping[str, Any],
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    size: Mapping[str, int],
) -> str:
    """Write ``run.json`` and return the fingerprint; continue only a run that was configured the same.

    Args:
        output: the output folder.
        fields: all that changes a vector, by name.
        layout: all that changes the columns of the output files, by name.
        config: the options, for the reader's information.
        model: what search must know to embed a query.
        size: readable shards of the input and their rows, for whoever watches.

    Raises:
        ConfigError: the folder holds finished shards of another configuration; every field that differs is named.
    """
    previous = output.read_json(RUN_FILE)
    if isinstance(previous, dict) and Ledger(output).keys():
        different = [
            f"{name.replace('_', '-')} is {_short(previous[part].get(name))} there and {_short(value)} now"
            for part, current in (("fields", fields), ("layout", layout))
            for name, value in current.items()
            if previous.get(part, {}).get(name) != value
        ]
        if different:
            raise ConfigError(
                f"--output {output.root}: made with another configuration: {'; '.join(different)}. "
                "Use another --output, or the options it was made with"
            )
    mark = fingerprint(fields)
    document = {
        "version": VERSION,
        "fingerprint": mark,
        "fields": dict(fields),
        "layout": dict(layout),
        "config": dict(config),
        "model": dict(model),
        "input": dict(size),
    }
    if isinstance(previous, dict) and previous.get("fingerprint") == mark and "budget" in previous:
        document["budget"] = previous["budget"]
    if document != previous:
        output.write_json(RUN_FILE, document)
    return mark


def read_budget(output: Storage, device: str) -> int:
    """The token budget an unfinished run was begun with on such a device, so that it goes on with the same batches.

    0 where there is none.
    """
    document = output.read_json(RUN_FILE)
    budget = document.get("budget") if isinstance(document, dict) else None
    known = isinstance(budget, dict) and budget.get("device") == device.partition(":")[0]
    return int(budget["max_batch_tokens"]) if known and budget is not None else 0


def note_budget(output: Storage, device: str, max_batch_tokens: int) -> None:
    """Keep it in ``run.json``."""
    document = read_run(output)
    budget = {"device": device.partition(":")[0], "max_batch_tokens": max_batch_tokens}
    output.write_json(RUN_FILE, {**document, "budget": budget})


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…" + text[-1]
