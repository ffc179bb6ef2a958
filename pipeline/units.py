"""What the threads of a worker hand on: units of work and their windows, from feed to encoder to sink."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import telemetry
from pipeline.errors import EXIT_BUG, EmbedCorpusError, ShardError, one_line
from pipeline.records import Counters, Shard, Tokens, Window
from pipeline.reuse import PreviousVectors

Say = Callable[..., None]
"""Sends one answer to the coordinator: ``say(event, **values)``."""


class Unit:
    """A shard, or a part of one, on its way through the threads.

    Attributes:
        shard: which.
        began: when its first row was wanted.
        counts: what it adds up to.
        seconds: exclusive seconds of the device's thread by stage; ``wall_s`` is all that this thread gave the unit.
        beside: seconds of work in other threads and processes.
        device_s, flops: seconds the device computed, and floating-point operations of the texts; 0 where unknown.
        lengths: (32,) int64, texts by length: number i counts those above 2**(i - 1) and up to 2**i tokens.
        done: its commit record, where an earlier one is still true.
        error: why it cannot be finished; what still comes of it is thrown away.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self.began = shard, time.perf_counter()
        self.counts, self.beside = Counters(), telemetry.Clock()
        self.seconds: dict[str, float] = {}
        self.wall_s = self.device_s = self.flops = 0.0
        self.lengths: NDArray[np.int64] = np.zeros(32, np.int64)
        self.previous: PreviousVectors | None = None
        self.done: dict[str, Any] | None = None
        self.error: Exception | None = None

    @property
    def is_join(self) -> bool:
        return bool(self.shard.parts) and self.shard.part is None


@dataclass
class TokenizedWindow:
    """A window on its way to the encoder and behind it.

    Attributes:
        unit: what it belongs to.
        window: its rows.
        text_of_row: (num_rows,) int64, which text each row has; -1 for none.
        tokens: of the window's different texts.
        hashes: (num_texts, 2) uint64, what each text is recognised by.
        vectors: (num_texts, dim) float32; NaN where a text has no token. Empty until the encoder has the window: what
            waits for it holds no memory for vectors.
    """

    unit: Unit
    window: Window
    text_of_row: NDArray[np.int64]
    tokens: Tokens
    hashes: NDArray[np.uint64]
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass(frozen=True)
class End:
    """What follows the last window of a unit."""

    unit: Unit


def say_error(say: Say, error: BaseException, unit: str | None = None) -> None:
    """Tell the coordinator what went wrong with a unit, or with a request that was none."""
    if isinstance(error, ShardError):
        say("bad", unit=unit, message=str(error))
    elif isinstance(error, EmbedCorpusError):
        say("error", unit=unit, message=str(error), exit_code=error.exit_code, trace=None)
    else:
        trace = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {one_line(error)}"
        say("error", unit=unit, message=message, exit_code=EXIT_BUG, trace=trace)
