"""Records -> which shards took longer than they should and why, which are the latest, and who works on them.

What a shard should take is what the usual record of the job takes for as many tokens, stage by stage; the usual one is
the median. So a large shard is not slow, and a slow one is told by what it waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipeline.report_records import Record, duration, iso
from pipeline.telemetry import rate
from pipeline.verdict import Load

MAX_SLOWEST = 10
MAX_LATEST = 10
MAX_WORKERS = 20
SLOW_SHARE = 0.1  # of its time that a record must have lost to be called slow
CLEARLY = 1.1  # times the usual value


def slowest(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Those that lost the most seconds, worst first; none where all are alike."""
    computed = [record for record in records if record.counts.tokens]
    if len(computed) < 2:
        return []
    usual = _Usual(computed)
    lost = [(usual.lost_s(record), record) for record in computed]
    slow = sorted((pair for pair in lost if pair[0] > SLOW_SHARE * pair[1].wall_s), key=lambda pair: -pair[0])
    return [
        {**_row(record), "lost_s": round(seconds, 2), "why": usual.why(record)}
        for seconds, record in slow[:MAX_SLOWEST]
    ]


def latest(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The last ones, youngest first."""
    return [_row(record) for record in sorted(records, key=lambda one: -one.ended)[:MAX_LATEST]]


def workers(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each kind of device on each host did; those that wrote last come first."""
    by_place: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_place.setdefault((record.host, record.device), []).append(record)
    places = sorted(by_place, key=lambda place: (-max(record.ended for record in by_place[place]), place))
    return [_worker(host, device, by_place[host, device]) for host, device in places[:MAX_WORKERS]]


def _worker(host: str, device: str, records: Sequence[Record]) -> dict[str, Any]:
    tokens, device_s = sum(one.counts.tokens for one in records), sum(one.wall_s for one in records)
    return {
        "host": host,
        "device": device,
        "records": len(records),
        "rows": sum(one.counts.rows for one in records),
        "tokens": tokens,
        "device_s": round(device_s, 3),
        "tokens_per_device_s": rate(tokens, device_s),
        "device_idle": round(Load.of(one.load for one in records).idle, 4),
        "last_record": iso(max(one.ended for one in records)),
    }


def _row(record: Record) -> dict[str, Any]:
    return {
        "shard": record.name,
        "rows": record.counts.rows,
        "tokens": record.counts.tokens,
        "seconds": round(record.wall_s, 3),
        "tokens_per_s": rate(record.counts.tokens, record.wall_s),
        "host": record.host,
        "device": record.device,
        "ended": iso(record.ended),
    }


class _Usual:
    """The median record, as seconds a token by stage and what its texts and device are like."""

    def __init__(self, records: Sequence[Record]) -> None:
        names = {name for record in records for name in record.load["seconds"]}
        self._s_per_token = {
            name: median(record.load["seconds"].get(name, 0.0) / record.counts.tokens for record in records)
            for name in names
        }
        self._length = median(map(_mean_length, records))
        self._work = median(_work(record) / record.counts.tokens for record in records)
        self._speed = median(map(_speed, records))

    def lost_s(self, record: Record, stage: str = "wall") -> float:
        """Beyond what the usual record takes for as many tokens."""
        return float(record.load["seconds"].get(stage, 0.0) - self._s_per_token[stage] * record.counts.tokens)

    def why(self, record: Record) -> str:
        """What most of the lost time went into."""
        stages = [name for name in record.load["seconds"] if name != "wall"]
        stage = max(stages, key=lambda name: self.lost_s(record, name))
        took, busy = duration(record.load["seconds"][stage]), record.load["busy_seconds"]
        if stage == "wait_for_input":
            beside = {name: busy.get(name, 0.0) for name in ("read", "tokenize", "chunk") if busy.get(name)}
            worked = ", ".join(f"{name} {duration(seconds)}" for name, seconds in beside.items())
            return f"waited {took} for its input" + (f" ({worked})" if worked else "")
        if stage == "wait_for_writer":
            return f"waited {took} for the writer"
        if stage != "encode":
            return {"pack": "packing batches", "reuse": "looking up known vectors"}.get(stage, "the host") + f" {took}"
        return self._why_computing(record)

    def _why_computing(self, record: Record) -> str:
        if record.counts.oom_splits:
            return f"memory ended {record.counts.oom_splits:,} times, batches were halved"
        longer = _work(record) / record.counts.tokens / self._work
        slower = self._speed / speed if (speed := _speed(record)) else 1.0
        if slower >= max(longer, CLEARLY):
            return f"the device computed at {1 / slower:.0%} of its usual speed"
        if longer >= CLEARLY:
            return f"longer texts: {_mean_length(record):,.0f} tokens, usual are {self._length:,.0f}"
        return "computing took longer"


def _mean_length(record: Record) -> float:
    return record.counts.tokens / max(1, record.counts.texts - record.counts.reused)


def _work(record: Record) -> float:
    """Operations, which grow faster than tokens where texts are long; tokens where the model's shape is not known."""
    return record.flops or float(record.counts.tokens)


def _speed(record: Record) -> float:
    device_s = record.load["busy_seconds"].get("device", 0.0)
    return float(_work(record) / device_s) if device_s else 0.0
