"""What is finished: one commit record a shard, written last, and ``run.json`` that says how all of them were made.

Only what a commit record names counts, for resume, index, search and verify. A record counts only while its output file
is there with the recorded size, and only for the input and the configuration it was made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pipeline.errors import ConfigError
from pipeline.records import Shard
from pipeline.shards import natural_key
from pipeline.storage import Output

RUN_FILE = "run.json"
VERSION = 1


def fingerprint(fields: Mapping[str, Any]) -> str:
    """Hash of all that changes a vector; equal fingerprints mean one vector space."""
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:32]


class Ledger:
    """The records below ``OUTPUT/commits``."""

    def __init__(self, output: str | Output) -> None:
        self.output = output if isinstance(output, Output) else Output(output)

    def record(self, key: str) -> dict[str, Any] | None:
        """The commit record of a shard, or None when there is none to be trusted."""
        record = self.output.read_json(commit_name(key))
        if not isinstance(record, dict) or record.get("version") != VERSION:
            return None
        return record if self._outputs_present(record) else None

    def _outputs_present(self, record: dict[str, Any]) -> bool:
        parts = [record["output"], *([record["quarantine"]] if record.get("quarantine") else [])]
        return all(self.output.size(part["path"]) == part["bytes"] for part in parts)

    def commits(self) -> list[dict[str, Any]]:
        """All records that count, in natural order of their keys."""
        records = (self.record(key) for key in self.keys())
        return [record for record in records if record is not None]

    def keys(self) -> list[str]:
        names = self.output.files("commits", ".json")
        return sorted((name[len("commits/") : -len(".json")] for name in names), key=natural_key)

    def is_done(self, shard: Shard, run_fingerprint: str) -> bool:
        record = self.record(shard.key)
        return record is not None and record["fingerprint"] == run_fingerprint and same_input(record["shard"], shard)

    def commit(self, record: dict[str, Any]) -> None:
        self.output.write_json(commit_name(record["shard"]["key"]), {"version": VERSION, **record})

    def forget(self, key: str) -> None:
        """Take a record back before its output is replaced, so that the two never disagree."""
        self.output.remove(commit_name(key))


def commit_name(key: str) -> str:
    return f"commits/{key}.json"


def same_input(recorded: Mapping[str, Any], shard: Shard) -> bool:
    """Size and modification time, not the path: a moved input folder is still the same input."""
    return (recorded["size_bytes"], recorded["mtime_ns"]) == (shard.size_bytes, shard.mtime_ns)


def read_run(output: str | Output) -> dict[str, Any]:
    """The content of ``run.json``.

    Raises:
        ConfigError: the folder holds no run.
    """
    place = output if isinstance(output, Output) else Output(output)
    document = place.read_json(RUN_FILE)
    if not isinstance(document, dict):
        raise ConfigError(f"{place.root}: no {RUN_FILE} here; expected the --output folder of 'embed-corpus run'")
    return document


def start_run(
    output: Output,
    fields: Mapping[str, Any],
    layout: Mapping[str, Any],
    config: Mapping[str, Any],
    model: Mapping[str, Any],
) -> str:
    """Write ``run.json`` and return the fingerprint; continue only a run that was configured the same.

    Args:
        output: the output folder.
        fields: all that changes a vector, by name.
        layout: all that changes the columns of the output files, by name.
        config: the options, for the reader's information.
        model: what search must know to embed a query.

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
    }
    if document != previous:
        output.write_json(RUN_FILE, document)
    return mark


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…" + text[-1]
