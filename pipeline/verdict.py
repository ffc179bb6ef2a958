"""One sentence on what bounded a run, and what to turn so that the next one is faster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

BUSY_DEVICE = 0.90  # of the time; a device that computes for longer is what bounds the run
MIN_WALL_S = 1.0  # of all workers together; what is over sooner says nothing


@dataclass(frozen=True)
class Load:
    """Where the time of a run's shards went, all workers together.

    Attributes:
        wall_s: seconds of the devices' threads.
        stages: exclusive parts of it, by stage.
        busy: seconds of work in other threads and processes, by stage, and of the ``device`` itself.
        peak_share: of the machine's matrix-product peak that was reached while the device computed; None where it is
            not known.
    """

    wall_s: float
    stages: dict[str, float]
    busy: dict[str, float]
    peak_share: float | None = None

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Load:
        """Added up over commit records."""
        records = list(records)
        stages: dict[str, float] = {}
        busy: dict[str, float] = {}
        for record in records:
            for total, part in ((stages, record["seconds"]), (busy, record["busy_seconds"])):
                for name, value in part.items():
                    total[name] = total.get(name, 0.0) + value
        device_s = busy.get("device", 0.0)
        shares = [(r["peak_share"], r["busy_seconds"].get("device", 0.0)) for r in records if r.get("peak_share")]
        known_s = sum(seconds for _, seconds in shares)
        peak_share = sum(share * seconds for share, seconds in shares) / known_s if known_s else None
        return cls(stages.pop("wall", 0.0), stages, {**busy, "device": device_s}, peak_share)

    @property
    def idle(self) -> float:
        """Share of the time in which the device did not compute."""
        return max(0.0, 1.0 - self.busy["device"] / self.wall_s) if self.wall_s else 0.0


def verdict(records: Sequence[dict[str, Any]], tokenizer_workers: int, spare_cores: int) -> str:
    """Empty where too little was computed to tell.

    Args:
        records: commit records of the run.
        tokenizer_workers: processes a device; 0 where the worker tokenizes itself.
        spare_cores: a device, beyond those that are in use.
    """
    load = Load.of(records)
    if load.wall_s < MIN_WALL_S:
        return ""
    if load.idle <= 1 - BUSY_DEVICE:
        reached = "" if load.peak_share is None else f", at {load.peak_share:.0%} of its matrix-product peak"
        return (
            f"device-bound: it computed {1 - load.idle:.0%} of the time{reached}; "
            "another device, half precision or a smaller --max-length would help"
        )
    stage = max(("wait_for_input", "wait_for_writer", "host"), key=lambda name: _seconds(load, name))
    saved = _seconds(load, stage)
    gain = f"+{saved / max(load.wall_s - saved, 1e-9):.0%}"
    share = f"the device waited {saved / load.wall_s:.0%} of the time"
    if stage == "host":
        return f"host-bound: {share} for batches to be packed; a larger --max-batch-tokens would give up to {gain}"
    if stage == "wait_for_writer":
        return (
            f"writer-bound: {share} for vectors to be written; a faster --output or --embedding-dtype float16 "
            f"would give up to {gain}"
        )
    bound = max(("tokenize", "chunk", "read"), key=lambda name: load.busy.get(name, 0.0))
    if bound == "read":
        return f"reader-bound: {share} for rows to be read; a copy of the input nearer by would give up to {gain}"
    # As many as turn out texts as fast as the device takes them.
    now = max(1, tokenizer_workers)
    work = load.busy.get("tokenize", 0.0) + load.busy.get("chunk", 0.0)
    more = max(1, math.ceil(work / max(load.wall_s - saved, 1e-9)) - (now if tokenizer_workers else 0))
    plural = "" if more == 1 else "s"
    if spare_cores < 1:
        return f"tokenizer-bound: {share}; a machine with {more} more core{plural} a device would give about {gain}"
    return f"tokenizer-bound: {share}; {more} more --tokenizer-workers would give about {gain}"


def _seconds(load: Load, stage: str) -> float:
    if stage == "host":
        return sum(load.stages.get(name, 0.0) for name in ("pack", "reuse", "other"))
    return load.stages.get(stage, 0.0)
