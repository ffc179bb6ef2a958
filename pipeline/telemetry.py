"""Where the time of a shard went, and what a whole run added up to.

Stage seconds are exclusive: a worker's main thread is in exactly one stage at a time, and all its time from the end of
one shard to the end of the next belongs to the latter. So they sum to the shard's wall time, and the shards' wall times
to the worker's. What runs beside it (reading, tokenising, writing, the device) is reported as busy seconds of its own
and is not part of that sum.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.errors import EXIT_BUG, EXIT_DATA, EXIT_OK, EXIT_STOPPED
from pipeline.records import Counters


class Clock:
    """Adds up seconds by name."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.add(name, self._now() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def waiting(self, name: str, source: Iterator[Any]) -> Iterator[Any]:
        """The items of ``source``; the time it takes to get each is counted under ``name``."""
        while True:
            with self.stage(name):
                item = next(source, _NOTHING)
            if item is _NOTHING:
                return
            yield item


_NOTHING = object()


def shard_telemetry(
    counts: Counters,
    stages: dict[str, float],
    busy: dict[str, float],
    wall_s: float,
    flops: float = 0.0,
    peak_flops_per_s: float = 0.0,
) -> dict[str, Any]:
    """The measured part of a commit record.

    Args:
        counts: what the shard added up to.
        stages: exclusive seconds by stage of the main thread; the rest of ``wall_s`` is called ``other``.
        busy: seconds of work beside the main thread, by stage; ``device`` is what the device itself computed.
        wall_s: of the main thread.
        flops: floating-point operations of the texts, see ``flops.flops``; 0 where the model's shape is not known.
        peak_flops_per_s: of this machine's best matrix product; 0 where it was not measured.
    """
    device_s = busy.get("device", 0.0)
    flops_per_s = flops / device_s if device_s else 0.0
    stages = {**stages, "other": max(0.0, wall_s - sum(stages.values()))}
    return {
        "counts": asdict(counts),
        "seconds": {"wall": round(wall_s, 4), **{name: round(value, 4) for name, value in stages.items()}},
        "busy_seconds": {name: round(value, 4) for name, value in busy.items()},
        "device_idle": round(max(0.0, 1 - device_s / wall_s), 4) if wall_s else 0.0,
        "flops": flops,
        "flops_per_s": round(flops_per_s),
        "peak_flops_per_s": round(peak_flops_per_s),
        "peak_share": round(flops_per_s / peak_flops_per_s, 4) if peak_flops_per_s else None,
        "tokens_per_s": rate(counts.tokens, wall_s),
        "texts_per_s": rate(counts.rows_out, wall_s),
        "token_efficiency": round(counts.tokens / counts.computed_tokens, 6) if counts.computed_tokens else 1.0,
    }


def rate(amount: float, seconds: float) -> float:
    return round(amount / seconds, 1) if seconds > 0 else 0.0


def peak_memory_bytes() -> int:
    """Largest resident size this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


@dataclass(frozen=True)
class Failure:
    """A shard or index that was not finished: ``bad`` data, ``gave up`` after workers died, or a ``bug`` of ours."""

    shard: str
    kind: str
    reason: str


@dataclass(repr=False)
class RunReport:
    """What a run did. ``rows == rows_out + quarantined`` over all finished shards, those of earlier runs included.

    Attributes:
        output: the output folder.
        shards_total, shards_done, shards_skipped, shards_failed: done in this run; skipped were finished before.
        shards_pruned: whose output was removed, since they are not in the input any more.
        counts: of the shards done in this run.
        total_rows, total_rows_out, total_quarantined: of all finished shards.
        wall_s: whole run, worker start and index included.
        encode_wall_s: from the first shard handed out to the last one finished.
        failed: shards without a commit record, and why; the index, too, where it could not be built.
        shards: commit records of this run.
        index: the published index, or None.
        certificate: what ``--verify`` found, or None.
        planned: ``tokens`` and ``seconds`` that ``plan --output`` expected, beside ``took_s``; None without a plan.
        retries: units that were given out again after their worker was lost.
        rank: which of several processes this was, such as ``3 of 8``; empty for a run of all shards.
        stopped: which limit ended the run before its work was done; empty for none.
        price_per_hour, cost: of the machine, and of this run so far; None where the price was not given.
        verdict: one sentence on what bounded the run; empty where too little was computed to tell.
        warnings: what a person should know.
    """

    output: str
    model: str = ""
    device: str = ""
    attention: str = ""
    dtype: str = ""
    dim: int = 0
    shards_total: int = 0
    shards_done: int = 0
    shards_skipped: int = 0
    shards_failed: int = 0
    shards_pruned: int = 0
    counts: Counters = field(default_factory=Counters)
    total_rows: int = 0
    total_rows_out: int = 0
    total_quarantined: int = 0
    wall_s: float = 0.0
    encode_wall_s: float = 0.0
    retries: int = 0
    failed: list[Failure] = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)
    index: dict[str, Any] | None = None
    certificate: dict[str, Any] | None = None
    planned: dict[str, float] | None = None
    rank: str = ""
    stopped: str = ""
    price_per_hour: float | None = None
    verdict: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return rate(self.counts.tokens, self.encode_wall_s)

    @property
    def texts_per_s(self) -> float:
        return rate(self.counts.rows_out, self.encode_wall_s)

    @property
    def cost(self) -> float | None:
        return None if self.price_per_hour is None else self.wall_s / 3600 * self.price_per_hour

    @property
    def cost_per_million_tokens(self) -> float | None:
        return self.cost / self.counts.tokens * 1e6 if self.cost is not None and self.counts.tokens else None

    def add_shard(self, record: dict[str, Any]) -> None:
        self.shards_done += 1
        self.shards.append(record)
        self.counts.add(Counters(**record["counts"]))

    def add_failure(self, shard: str, kind: str, reason: str) -> None:
        self.shards_failed += shard != "index"
        self.failed.append(Failure(shard, kind, reason if reason.startswith(shard) else f"{shard}: {reason}"))

    @property
    def exit_code(self) -> int:
        """The gravest of what happened: our bug, an unfinished shard, bad data or a fault found by verifying, none."""
        kinds = {failure.kind for failure in self.failed}
        if "bug" in kinds:
            return EXIT_BUG
        if "gave up" in kinds or self.stopped:
            return EXIT_STOPPED
        proven = self.certificate is None or self.certificate["ok"]
        return EXIT_OK if proven and not kinds else EXIT_DATA

    def to_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``; shards in short form, their full records lie in ``commits/``."""
        document = asdict(self)
        document["tokens_per_s"], document["texts_per_s"] = self.tokens_per_s, self.texts_per_s
        document["shards"] = [dict(zip(SHARD_COLUMNS, row, strict=True)) for row in self.shard_rows()]
        document["cost"], document["cost_per_million_tokens"] = self.cost, self.cost_per_million_tokens
        document["wall_s"], document["encode_wall_s"] = round(self.wall_s, 3), round(self.encode_wall_s, 3)
        return document

    def shard_rows(self) -> list[tuple[Any, ...]]:
        """One row a shard, columns as ``SHARD_COLUMNS``."""
        return [
            (
                record["shard"]["key"],
                record["counts"]["rows_out"],
                sum(record["counts"]["quarantined"].values()),
                record["counts"]["tokens"],
                record["counts"]["truncated_texts"],
                record["tokens_per_s"],
                record["token_efficiency"],
                record["seconds"]["wall"],
            )
            for record in self.shards
        ]

    def __repr__(self) -> str:
        return self.sentence()

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(
            "<tr>" + "".join(f"<td>{escape(display(value))}</td>" for value in row) + "</tr>"
            for row in self.shard_rows()
        )
        head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in SHARD_COLUMNS)
        return f"<p>{escape(self.sentence())}</p><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"

    def sentence(self) -> str:
        """The whole run in one line."""
        if not self.shards_done and not self.shards_failed and not self.shards_pruned and not self.stopped:
            if not self.shards_skipped:
                return f"Nothing to do: no shard of {self.output} is this one's."
            return f"Nothing to do: all {self.shards_skipped} shards of {self.output} are finished."
        parts = [f"{self.shards_done} of {self.shards_total} shards", f"{self.counts.rows_out:,} vectors of {self.dim}"]
        if self.counts.quarantined:
            parts.append(f"{sum(self.counts.quarantined.values()):,} rows quarantined")
        if self.shards_skipped:
            parts.append(f"{self.shards_skipped} finished before")
        if self.shards_pruned:
            parts.append(f"{self.shards_pruned} removed")
        if self.shards_failed:
            parts.append(f"{self.shards_failed} failed")
        parts.append(f"{self.counts.tokens:,} tokens in {self.encode_wall_s:.1f} s ({self.tokens_per_s:,.0f} tokens/s)")
        if self.cost is not None:
            each = self.cost_per_million_tokens
            parts.append(f"cost {self.cost:,.4g}" + ("" if each is None else f" ({each:,.3g} a million tokens)"))
        return ", ".join(parts) + self._beside_plan()

    def _beside_plan(self) -> str:
        plan = self.planned
        if plan is None:
            return ""
        return f"; planned {plan['tokens']:,.0f} tokens in {plan['seconds']:,.1f} s, took {plan['took_s']:,.1f} s"


SHARD_COLUMNS = (
    "shard", "vectors", "quarantined", "tokens", "truncated", "tokens_per_s", "token_efficiency", "seconds",
)  # fmt: skip


def display(value: Any) -> str:
    """A table cell: thousands separated, floats short."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
