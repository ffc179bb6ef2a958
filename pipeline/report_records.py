"""An output folder -> the records in it that count for a report, and by name those that are damaged.

Only small JSON files are read, many at once, without the lock and while a run may be writing: what vanishes between
listing and reading is no fault, and a shard that is being put together from its parts counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline import ending, ledger
from pipeline.errors import ConfigError
from pipeline.records import PARTS, Counters, commit_name
from pipeline.storage import Storage
from pipeline.verdict import Load

READS_AT_ONCE = 16
LISTINGS = 5  # a folder of parts may vanish while it is listed


@dataclass(frozen=True)
class Record:
    """The commit record of a shard, or of a part, as far as a report needs it.

    Attributes:
        key, part: which shard, and which part of it; None for a whole one.
        name: to be shown.
        identity: of the input it was made from.
        began, ended: of the device's thread, in seconds since 1970.
        load: what `verdict.Load` is made of.
    """

    key: str
    part: int | None
    name: str
    fingerprint: str
    identity: tuple[Any, ...]
    sha256: str
    began: float
    ended: float
    counts: Counters
    load: dict[str, Any]
    flops: float
    lengths: dict[int, int]
    cost: float | None
    host: str
    device: str
    dtype: str
    attention: str
    dim: int

    @classmethod
    def of(cls, document: dict[str, Any]) -> Record:
        """Raises KeyError, TypeError, ValueError or AttributeError where it is not as a worker writes it."""
        if document["version"] != ledger.VERSION:
            raise ValueError(f"it is of version {document['version']}, this program knows {ledger.VERSION}")
        shard, part = document["shard"], document["shard"].get("part")
        began, ended = _span(document)
        number = None if part is None else int(part["number"])
        record = cls(
            key=shard["key"],
            part=number,
            name=shard["key"] if number is None else f"{shard['key']}#{number}",
            fingerprint=document["fingerprint"],
            identity=tuple(shard.get(name) for name in ("size_bytes", "mtime_ns", "etag", "num_rows")),
            sha256=document["output"]["sha256"],
            began=began,
            ended=ended,
            counts=Counters(**document["counts"]),
            load={name: document.get(name) for name in ("seconds", "busy_seconds", "peak_share")},
            flops=float(document.get("flops") or 0.0),
            lengths={int(limit): int(count) for limit, count in document.get("length_histogram", {}).items()},
            cost=None if document.get("cost") is None else float(document["cost"]),
            host=str(document.get("host", "")),
            device=str(document["device"]),
            dtype=str(document["dtype"]),
            attention=str(document["attention"]),
            dim=int(document["output"]["dim"]),
        )
        Counters().add(record.counts)  # that they are numbers
        if not math.isfinite(Load.of([record.load]).wall_s + began):
            raise ValueError("its times are no numbers")
        return record

    @property
    def wall_s(self) -> float:
        """Of the device's thread; for a shard put together from parts, of all of them."""
        return float(self.load["seconds"]["wall"])


def _span(document: dict[str, Any]) -> tuple[float, float]:
    """When a record's work began and ended."""
    ended, wall_s = epoch(document["finished"]), float(document["seconds"]["wall"])
    if "began" in document:
        return min(epoch(document["began"]), ended), ended
    if document.get("parts"):  # its time is that of its first part, and the others came after it
        began = ended - wall_s / document["parts"]
        return began, began + wall_s
    return ended - wall_s, ended


@dataclass(frozen=True)
class Seen:
    """What lies in one output.

    Attributes:
        records: of its configuration, in the order in which they ended; the work of each shard once.
        damaged: why, by name.
        num_other: records of another configuration.
        runs: how the last ones ended, see `ending`; those that ended last come last, after them those that did not.
    """

    output: str
    run: dict[str, Any]
    plan: dict[str, Any] | None
    index: dict[str, Any] | None
    certificate: dict[str, Any] | None
    records: list[Record]
    damaged: dict[str, str]
    num_other: int
    runs: list[dict[str, Any]]

    @property
    def shards(self) -> list[Record]:
        """The finished ones."""
        return [record for record in self.records if record.part is None]


def look(store: Storage) -> Seen:
    """Read what a report needs of one output.

    Raises:
        ConfigError: it is none, or cannot be read.
        OutputError: the store does not answer.
    """
    damaged: dict[str, str] = {}
    try:
        run = ledger.read_run(store)
        # Parts before shards: a shard that is put together in between is seen twice, which can be told, and not never.
        names = [*_names(store, PARTS), *_names(store, "commits")]
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            found = list(pool.map(lambda name: _record(store, name, damaged), names))
        notes = [_document(store, name, damaged) for name in _names(store, ending.FOLDER)]
        plan, index, certificate = (
            _document(store, name, damaged) for name in ("plan.json", "index/index.json", "certificate.json")
        )
    except OSError as error:
        raise ConfigError(f"{store.root}: cannot be read ({error.strerror}); expected an output of yours") from None
    records = [record for record in found if record is not None]
    ours = [record for record in records if record.fingerprint == run.get("fingerprint")]
    return Seen(
        output=str(store.root),
        run=run,
        plan=plan,
        index=index,
        certificate=certificate,
        records=sorted(_once(ours), key=lambda record: (record.ended, record.name)),
        damaged=dict(sorted(damaged.items())),
        num_other=len(records) - len(ours),
        runs=sorted((note for note in notes if note is not None), key=lambda note: note["ended"] or "~"),
    )


def _names(store: Storage, folder: str) -> list[str]:
    for _ in range(LISTINGS - 1):
        try:
            return list(store.files(folder, ".json"))
        except FileNotFoundError:
            continue
    return list(store.files(folder, ".json"))


def _record(store: Storage, name: str, damaged: dict[str, str]) -> Record | None:
    document = _document(store, name, damaged)
    if document is None:
        return None
    try:
        record = Record.of(document)
        if commit_name(record.key, record.part) != name:
            raise ValueError(f"it is of {record.name}")
        return record
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        damaged[name] = f"not as a run writes it ({reason}); {_remedy(name)}"
        return None


def _document(store: Storage, name: str, damaged: dict[str, str]) -> dict[str, Any] | None:
    """None where there is none, and where it is damaged."""
    try:
        document = store.read_json(name)
        if document is None and store.size(name) is None:
            return None  # there is none, or not any more
    except OSError as error:
        damaged[name] = f"cannot be read ({error.strerror}); expected an output of yours"
        return None
    if not isinstance(document, dict):
        damaged[name] = f"cut short, or no JSON object; {_remedy(name)}"
        return None
    try:
        (_check_run if name.startswith(f"{ending.FOLDER}/") else CHECKS.get(name, bool))(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        damaged[name] = f"not as embed-corpus writes it ({reason}); {_remedy(name)}"
        return None
    return document


def _check_index(index: dict[str, Any]) -> None:
    """Raises an error where a field that is shown is not as the indexer writes it."""
    str.strip(index["factory"])
    figures = [index["ntotal"], *(index.get("recall_at_10") or {}).values(), *(index.get("latency_ms") or {}).values()]
    math.fsum(figures)
    for shard in index["shards"]:
        shard["key"], shard["sha256"]


def _check_certificate(certificate: dict[str, Any]) -> None:
    list.copy(certificate["faults"])
    parity = certificate["parity"]
    if parity.get("rows"):
        math.fsum([parity["rows"], parity["cosine_min"]])


def _check_plan(plan: dict[str, Any]) -> None:
    math.fsum([plan["tokens"]["value"], plan["embed_s"], plan.get("price_per_hour") or 0.0])


def _check_run(note: dict[str, Any]) -> None:
    epoch(note["began"])
    math.fsum([note["num_ranks"]])
    if note["ended"] is not None:
        epoch(note["ended"])
        str.strip(note["reason"] + note["outcome"] + note["host"] + note["rank"])
        math.fsum([note["exit_code"], note["retries"], note["num_failed"]])
        for failure in note["failed"]:
            str.strip(failure["shard"] + failure["reason"])


CHECKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "index/index.json": _check_index,
    "certificate.json": _check_certificate,
    "plan.json": _check_plan,
}


def _remedy(name: str) -> str:
    commands = {"plan.json": "plan", "certificate.json": "verify", "index/index.json": "index"}
    return f"remove it and run `embed-corpus {commands.get(name, 'run')}` again"


def _once(records: Sequence[Record]) -> Iterator[Record]:
    """The work of each shard once.

    The parts of a shard are removed when its own record stands. If both are there, either the parts are about to go, or
    the input has changed, and the younger parts are what is being made of it.
    """
    shards = {record.key: record for record in records if record.part is None}
    youngest: dict[str, Record] = {}
    for record in records:
        if record.part is not None and (record.key not in youngest or youngest[record.key].ended < record.ended):
            youngest[record.key] = record
    again = {
        key
        for key, part in youngest.items()
        if key not in shards or (part.identity != shards[key].identity and part.ended > shards[key].ended)
    }
    for record in records:
        if record.part is None:
            if record.key not in again:
                yield record
        elif record.key in again and record.identity == youngest[record.key].identity:
            yield record


def epoch(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: float) -> str:
    """``3.2 s``, ``58 s``, ``3.5 min``, ``34 min``, ``5.1 h``, ``3.4 days``; for a person."""
    if 0 < seconds < 0.05:
        return "<0.1 s"
    for limit, unit_s, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            amount = f"{seconds / unit_s:.{1 if seconds / unit_s < 9.95 else 0}f}"
            return f"{amount.removesuffix('.0')} {name}"
    return f"{seconds / 86400:,.1f}".removesuffix(".0") + " days"
