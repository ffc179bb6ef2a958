"""Calls that wait, into batches: which texts are computed together, and when.

Bounded in tokens and in calls. Nothing here knows time or computes: whoever uses it says what time it is, so every rule
can be checked by hand. The rules:

- A call is refused when its tokens do not fit beside what waits, one text or many alike. One that is larger than the
  whole queue is taken by an empty one only.
- With the device free, whatever waits is a batch at once. While it computes, a batch is handed over behind it only when
  it is full (`max_batch_tokens` or `max_batch_size`) or its oldest call has waited `max_delay_s`.
- The query lane goes first. While both lanes wait, bulk is owed `BULK_SHARE` of the tokens and gets its turn as soon as
  that adds up to a batch of it.
- Within a lane the oldest call comes first. A call larger than a batch is split over batches; its texts go longest
  first, so each of its batches holds texts of like length. So does every batch: longest first.
- A call that is past its deadline, or whose caller is gone, is dropped before it gets into a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LaneName = Literal["query", "bulk"]

BULK_SHARE = 0.25
"""Of the tokens computed while calls of both lanes wait; a query then waits for one batch of bulk in four."""


class QueueFull(Exception):
    """A call does not fit; nothing of it is kept."""


@dataclass(frozen=True)
class Limits:
    """What the queue holds and what a batch holds; a text longer than `max_batch_tokens` is a batch of its own."""

    max_batch_tokens: int
    max_batch_size: int = 64
    max_delay_s: float = 0.01
    max_requests: int = 512
    max_queue_tokens: int = 1 << 16


@dataclass(eq=False)
class Request:
    """One call, tokenized.

    Attributes:
        lengths: (n,) int32, tokens of each text, at least 1.
        lane: where it waits.
        deadline: on the clock of whoever uses the queue; not computed after it.
        prompt_length: leading tokens that pooling leaves out; only equal ones go into one batch.
        is_cancelled: whether the caller is gone.
        arrived: set by ``put``.
    """

    lengths: NDArray[np.int32]
    lane: LaneName = "query"
    deadline: float = math.inf
    prompt_length: int = 0
    is_cancelled: Callable[[], bool] = field(default=lambda: False)
    arrived: float = 0.0
    order: NDArray[np.int64] = field(init=False)
    taken: int = field(init=False, default=0)
    tokens_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.order = np.argsort(-self.lengths.astype(np.int64), kind="stable")
        self.tokens_left = int(self.lengths.sum())

    @property
    def texts_left(self) -> int:
        return len(self.order) - self.taken


@dataclass(frozen=True)
class Piece:
    """Texts of one call that are computed in one batch.

    Attributes:
        request: the call.
        texts: (k,) which of its texts.
    """

    request: Request
    texts: NDArray[np.int64]


class _Lane:
    """Calls in order of arrival. A dictionary, so that one that is dropped leaves from the middle at no cost."""

    def __init__(self) -> None:
        self.requests: dict[Request, None] = {}
        self.tokens = self.texts = 0

    def add(self, request: Request) -> None:
        self.requests[request] = None
        self.tokens += request.tokens_left
        self.texts += request.texts_left

    def remove(self, request: Request) -> None:
        if request in self.requests:
            del self.requests[request]
            self.tokens -= request.tokens_left
            self.texts -= request.texts_left

    def oldest(self) -> Request | None:
        return next(iter(self.requests), None)

    def take(self, request: Request, num_texts: int) -> Piece:
        texts = request.order[request.taken : request.taken + num_texts]
        num_tokens = int(request.lengths[texts].sum())
        request.taken += num_texts
        request.tokens_left -= num_tokens
        self.tokens -= num_tokens
        self.texts -= num_texts
        if not request.texts_left:
            del self.requests[request]
        return Piece(request, texts)


class RequestQueue:
    """Calls that wait.

    Args:
        limits: see there; may be replaced at any time.
        dropped: told of each call that is left out of a batch for good, with ``deadline`` or ``cancelled``.
    """

    def __init__(self, limits: Limits, dropped: Callable[[Request, Literal["deadline", "cancelled"]], None]) -> None:
        self.limits = limits
        self._dropped = dropped
        self._lanes: dict[LaneName, _Lane] = {"query": _Lane(), "bulk": _Lane()}
        self._owed_to_bulk = 0.0

    def __len__(self) -> int:
        """Calls with texts that are in no batch yet."""
        return sum(len(lane.requests) for lane in self._lanes.values())

    @property
    def tokens(self) -> int:
        return sum(lane.tokens for lane in self._lanes.values())

    @property
    def room(self) -> int:
        """Tokens that fit beside what waits; negative once the limit was lowered or a call larger than all came."""
        return self.limits.max_queue_tokens - self.tokens

    def requests(self) -> list[Request]:
        return [request for lane in self._lanes.values() for request in lane.requests]

    def put(self, request: Request, now: float) -> None:
        """Let a call wait.

        Raises:
            QueueFull: it does not fit.
        """
        if len(self) >= self.limits.max_requests:
            raise QueueFull(f"{len(self)} calls are waiting")
        if len(self) and request.tokens_left > self.room:
            raise QueueFull(f"{self.tokens} tokens are waiting")
        request.arrived = now
        self._lanes[request.lane].add(request)

    def remove(self, request: Request) -> None:
        """Forget what waits of a call; does nothing when nothing does."""
        self._lanes[request.lane].remove(request)

    def take(self, now: float, *, device_free: bool) -> list[Piece]:
        """The next batch, longest texts first within each call; empty when it is not time for one."""
        self._drop_oldest(now)
        lane = self._next_lane()
        if lane is None or not (device_free or self._is_full(lane) or now >= self._closes(lane)):
            return []
        pieces = self._fill(lane, now)
        self._settle(lane, sum(int(piece.request.lengths[piece.texts].sum()) for piece in pieces))
        return pieces

    def closes_at(self) -> float | None:
        """When a batch is due although the device computes; None when nothing waits."""
        waiting = [self._closes(lane) for lane in self._lanes.values() if lane.requests]
        return min(waiting, default=None)

    def _closes(self, lane: _Lane) -> float:
        oldest = lane.oldest()
        assert oldest is not None
        return oldest.arrived + self.limits.max_delay_s

    def _is_full(self, lane: _Lane) -> bool:
        return lane.tokens >= self.limits.max_batch_tokens or lane.texts >= self.limits.max_batch_size

    def _next_lane(self) -> _Lane | None:
        query, bulk = self._lanes["query"], self._lanes["bulk"]
        if not bulk.requests:
            return query if query.requests else None
        if not query.requests:
            return bulk
        return bulk if self._owed_to_bulk >= min(bulk.tokens, self.limits.max_batch_tokens) else query

    def _settle(self, lane: _Lane, num_tokens: int) -> None:
        """Note whose turn it was. What bulk is owed never adds up to more than one batch and one query batch."""
        if lane is self._lanes["bulk"]:
            self._owed_to_bulk = max(0.0, self._owed_to_bulk - num_tokens)
        elif self._lanes["bulk"].requests:
            self._owed_to_bulk += num_tokens * BULK_SHARE / (1 - BULK_SHARE)
        if not self._lanes["bulk"].requests:
            self._owed_to_bulk = 0.0

    def _drop_oldest(self, now: float) -> None:
        """So that the oldest call of a lane, which decides when a batch closes, is one that will be computed."""
        for lane in self._lanes.values():
            while (oldest := lane.oldest()) is not None and self._drop_if_useless(lane, oldest, now):
                pass

    def _drop_if_useless(self, lane: _Lane, request: Request, now: float) -> bool:
        if now < request.deadline and not request.is_cancelled():
            return False
        lane.remove(request)
        self._dropped(request, "deadline" if now >= request.deadline else "cancelled")
        return True

    def _fill(self, lane: _Lane, now: float) -> list[Piece]:
        pieces: list[Piece] = []
        tokens, texts = self.limits.max_batch_tokens, self.limits.max_batch_size
        for request in list(lane.requests):
            if not texts or not tokens:
                break
            if self._drop_if_useless(lane, request, now):
                continue
            if pieces and request.prompt_length != pieces[0].request.prompt_length:
                continue
            ahead = request.lengths[request.order[request.taken : request.taken + texts]]
            fitting = int(np.searchsorted(np.cumsum(ahead, dtype=np.int64), tokens, side="right"))
            if not fitting and pieces:
                break  # its turn comes with the next batch; nothing younger goes before it
            piece = lane.take(request, max(1, fitting))
            pieces.append(piece)
            tokens = max(0, tokens - int(request.lengths[piece.texts].sum()))
            texts -= len(piece.texts)
            if request.texts_left:
                break
        return pieces
