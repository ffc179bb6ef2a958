"""What a run may use of tokens, time and money, and what it has used: whoever pays decides when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import RunConfig
from pipeline.pool import Event
from pipeline.report_text import money


@dataclass(frozen=True)
class Limits:
    """None where there is none.

    Attributes:
        max_tokens: computed by this run.
        max_cost: of this run, in the currency of ``price_per_hour``.
        max_hours: since the run began, loading the model included.
        price_per_hour: of the machine with all devices of the run; 0 where it is not known.
    """

    max_tokens: int | None = None
    max_cost: float | None = None
    max_hours: float | None = None
    price_per_hour: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        return cls(config.max_tokens, config.max_cost, config.max_hours, config.price_per_hour or 0.0)


class Meter:
    """Counts what a run uses, from its events.

    Args:
        limits: what it may use.
        began: when it did, in seconds of ``now``.
        now: a clock.
    """

    def __init__(self, limits: Limits, began: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._limits, self._began, self._now = limits, began, now
        self._finished = 0
        self._in_work: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        return self._finished + sum(self._in_work.values())

    @property
    def hours(self) -> float:
        return (self._now() - self._began) / 3600

    def exceeded(self, event: Event) -> str:
        """Count an event; says which limit is reached, empty while none is."""
        if event.shard is not None:
            unit = event.shard.unit
            if event.kind == "progress":
                assert event.values is not None
                self._in_work[unit] = event.values["tokens"]
            else:
                self._in_work.pop(unit, None)
            is_join = event.kind == "done" and event.shard.parts  # whose parts are counted already
            if event.kind in ("part", "done") and not is_join:
                assert event.values is not None
                self._finished += event.values["counts"]["tokens"]
        limits, cost = self._limits, self.hours * self._limits.price_per_hour
        if limits.max_tokens is not None and self.tokens >= limits.max_tokens:
            return f"--max-tokens {limits.max_tokens:,} is reached ({self.tokens:,} computed)"
        if limits.max_cost is not None and cost >= limits.max_cost:
            return f"--max-cost {money(limits.max_cost)} is reached"
        if limits.max_hours is not None and self.hours >= limits.max_hours:
            return f"--max-hours {limits.max_hours:g} is reached"
        return ""
