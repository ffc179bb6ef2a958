"""Texts in, vectors out, many callers at once: the engine behind ``embed-corpus serve``.

    embed ──▶ tokenize ──▶ RequestQueue ──▶ batch ──▶ Lane (a process) ──▶ vectors to their callers

It runs on the event loop of the server process and loads neither torch nor faiss there. A batch is cut when there is
somebody to compute it, from what waits then; a call's vectors may come from several batches, and a batch may serve many
calls. What a text's vector is depends on neither: the lanes give the batch engine's vectors.

Nothing grows without a bound: calls in work, tokens that wait, and batches on their way are all counted and limited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pipeline import __version__
from pipeline.records import Tokens
from pipeline.serving.device_ring import InRing, Ring
from pipeline.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDown,
    NotEmbeddable,
    Overloaded,
    ServingError,
    TooLong,
)
from pipeline.serving.lanes import Computed, Lane
from pipeline.serving.request_queue import LaneName, Limits, Piece, QueueFull, Request, RequestQueue
from pipeline.serving.settings import ServeSettings
from pipeline.threads import available_cores
from pipeline.tokenizer import Tokenizer, _without_surrogates

# What is tokenized on the event loop itself takes less than the way to another thread and back, twice.
INLINE_CHARS = 2_000
DOWN_S = 5.0  # calls wait so long for a process that is being replaced; later ones are refused until it is there
SMOOTHING = 0.9  # of measured rates: about the last ten batches count
WARM_UP = ((1, 12), (16, 24))  # (texts, words) of the batches computed before the first caller


@dataclass(frozen=True)
class Embedded:
    """The answer to one call of n texts.

    Attributes:
        vectors: (n, dim) float32, as the batch run would store them.
        num_tokens: (n,) int64, after truncation, special tokens and prompt included.
        truncated: (n,) bool.
        seconds: ``queue``, ``tokenize`` and ``compute``; they add up to what the call took.
        lane: who computed it; names joined by ``+`` where batches went to several.
        in_ring: where the vectors are on the device, too; None unless all of them are in one ring.
    """

    vectors: NDArray[np.float32]
    num_tokens: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    seconds: dict[str, float]
    lane: str
    in_ring: InRing | None = None


@dataclass(frozen=True)
class Token:
    """One token of a text; ``start`` and ``stop`` are characters of prompt + text, None for one that is added."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True)
class EngineInfo:
    """What a server says of itself.

    Attributes:
        model: as it was given to the run.
        model_path: the folder.
        dim: length of a vector.
        max_length: token limit of a text, special tokens included; None for no limit.
        dtype, device, attention: of the batch encoder here.
        pooling: sentence-transformers' names, joined by ``+``.
        normalize: whether vectors are of unit length.
        prompts: of the model, by name.
        document_prompt, query_prompt: their texts.
        fingerprint: of the run whose vectors these belong to; of the model's files where there is no run.
        lane: who computes, and why not ONNX Runtime where it could.
        parity: of the ONNX lane's vectors with the batch encoder's: smallest cosine, largest relative difference.
        version: ours.
    """

    model: str
    model_path: str
    dim: int
    max_length: int | None
    dtype: str
    device: str
    pooling: str
    normalize: bool
    prompts: dict[str, str]
    document_prompt: str
    query_prompt: str
    fingerprint: str
    lane: str
    attention: str
    parity: dict[str, float] = field(default_factory=dict)
    version: str = __version__


class EngineStats:
    """Live figures; plain numbers, read at any time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.batches = self.tokens = self.texts = 0
        self.batch_fill = 0.0
        """Share of the token budget that batches use, a running mean."""
        self.rejected: dict[str, int] = dict.fromkeys(
            ("overloaded", "deadline", "cancelled", "too_long", "not_embeddable", "down"), 0
        )
        self._rate_tokens = self._rate_s = 0.0

    @property
    def queue_tokens(self) -> int:
        return self._engine._queue.tokens

    @property
    def queue_requests(self) -> int:
        return len(self._engine._queue)

    @property
    def in_flight(self) -> int:
        """Batches that are being computed."""
        return self._engine._in_flight

    @property
    def active_requests(self) -> int:
        """Calls that have no answer yet."""
        return self._engine._active

    @property
    def restarts(self) -> int:
        return sum(lane.restarts for lane in self._engine._lanes)

    @property
    def lanes(self) -> dict[str, int]:
        """Batches by lane."""
        return {lane.name: lane.batches for lane in self._engine._lanes}

    @property
    def tokens_per_s(self) -> float:
        """Of batches while they are computed, a running mean."""
        return self._rate_tokens / self._rate_s if self._rate_s else 0.0

    def count_batch(self, num_texts: int, num_tokens: int, seconds: float, budget: int) -> None:
        self.batches += 1
        self.texts += num_texts
        self.tokens += num_tokens
        self.batch_fill = SMOOTHING * self.batch_fill + (1 - SMOOTHING) * min(1.0, num_tokens / budget)
        self._rate_tokens = SMOOTHING * self._rate_tokens + num_tokens
        self._rate_s = SMOOTHING * self._rate_s + seconds


@dataclass(eq=False)
class _Call(Request):
    """A call and what has come back of it."""

    tokens: Tokens = field(default_factory=lambda: Tokens(np.zeros(0, np.int32), np.zeros(0, np.int32)))
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    missing: int = 0
    compute_s: float = 0.0
    lanes: list[str] = field(default_factory=list)
    rings: set[Ring] = field(default_factory=set)
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, texts: NDArray[np.int64], computed: Computed, places: NDArray[np.int64]) -> None:
        """Some of the call's texts, which lie at these places of a batch."""
        self.vectors[texts] = computed.vectors[places]
        if computed.in_ring is not None:
            self.rings.add(computed.in_ring.ring)
            self.numbers[texts] = computed.in_ring.numbers[places]
        self.missing -= len(texts)
        self.compute_s += computed.seconds

    @property
    def in_ring(self) -> InRing | None:
        """A process that was replaced has left its ring: then the call's vectors may be in two, or in none."""
        if len(self.rings) != 1 or not self.numbers.all():
            return None
        [ring] = self.rings
        return InRing(ring, self.numbers)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Engine:
    """Use `Engine.start`.

    Args:
        info: see there.
        tokenizer: without a prompt and with the model's length limit.
        lanes: what computes, best first; all give the same vectors.
        settings: limits and the default deadline.
        max_batch_tokens: resolved.
        depth: batches on their way to the device at once.
        pools_prompt: whether pooling keeps the tokens of a prompt.
    """

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        lanes: Sequence[Lane],
        settings: ServeSettings,
        *,
        max_batch_tokens: int,
        depth: int = 1,
        pools_prompt: bool = True,
    ) -> None:
        self.info, self._tokenizer, self._lanes, self._settings = info, tokenizer, list(lanes), settings
        self._depth, self._pools_prompt = depth, pools_prompt
        self._queue = RequestQueue(
            Limits(
                max_batch_tokens=max_batch_tokens,
                max_batch_size=settings.max_batch_size,
                max_delay_s=settings.max_queue_delay_ms / 1000,
                max_requests=settings.max_concurrent_requests,
                max_queue_tokens=settings.max_queue_tokens or 8 * max_batch_tokens,
            ),
            self._dropped,
        )
        self._active = self._in_flight = self._flying_tokens = 0
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(max(1, available_cores() // 2), thread_name_prefix="tokenize")
        self._plain: tokenizers.Tokenizer | None = None
        self.stats = EngineStats(self)
        self._down_since: float | None = None
        self._refused: _Refused | None = None
        for lane in self._lanes:
            lane.on_change = self._lane_changed

    @classmethod
    async def start(cls, output: str | None, settings: ServeSettings) -> Engine:
        """Open a finished output, start what computes, and wait until it does.

        Args:
            output: the folder given as ``--output`` to a run; None to serve ``settings.model`` alone.
            settings: see there.

        Raises:
            ConfigError: no run there, a model that is gone or was changed, or settings that cannot be had here.
        """
        from pipeline.serving.opening import open_engine

        return await open_engine(cls, output, settings)

    @property
    def is_up(self) -> bool:
        """Whether calls are taken and something computes."""
        return not self._draining and any(lane.is_ready for lane in self._lanes)

    async def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        truncate: bool = True,
        lane: LaneName = "query",
        deadline: float,
        cancelled: Callable[[], bool] | asyncio.Event | None = None,
    ) -> Embedded:
        """The vectors of n texts, each as the batch run would store it for ``prompt + text``.

        Args:
            texts: a list larger than a batch is split over batches.
            prompt: put before each text, as it is.
            truncate: cut what is above the length limit; False refuses it.
            lane: ``query`` goes before ``bulk``.
            deadline: on the loop's clock; what is not computed by then is not computed any more.
            cancelled: tells that the caller hung up.

        Raises:
            Overloaded, DeadlineExceeded, TooLong, NotEmbeddable, Cancelled, EngineDown: see `serving.errors`.
        """
        try:
            return await self._embed(texts, prompt, truncate, lane, deadline, cancelled)
        except ServingError as error:
            self.stats.rejected[error.reason] += 1
            raise
        except asyncio.CancelledError:
            self.stats.rejected["cancelled"] += 1
            raise

    def tokenize(self, texts: Sequence[str], prompt: str = "") -> list[list[Token]]:
        """The tokens of ``prompt + text`` for each text, special ones included, nothing cut off. Blocks."""
        if self._plain is None:
            plain = tokenizers.Tokenizer.from_str(self._tokenizer.spec.json)
            plain.no_padding()
            plain.no_truncation()
            plain.encode_special_tokens = self._tokenizer.spec.split_special_tokens
            self._plain = plain
        return [_tokens_of(_without_surrogates(prompt + text), self._plain) for text in texts]

    async def drain(self, timeout_s: float) -> bool:
        """Take no more calls, and wait for those that are in work; returns whether all were answered."""
        self._draining = True
        end = asyncio.get_running_loop().time() + timeout_s
        while self._active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        return not self._active

    async def close(self) -> None:
        """End all processes; calls still in work end in `EngineDown`."""
        self._draining = True
        if self._timer is not None:
            self._timer.cancel()
        for call in self._waiting():
            self._queue.remove(call)
            call.fail(EngineDown("the server is going down"))
        await asyncio.gather(*(lane.close() for lane in self._lanes))
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def warm_up(self) -> None:
        """Compute something on every lane, so that the first caller is not slower and the rate is known."""
        for lane in self._lanes:
            for num_texts, num_words in WARM_UP:
                tokens = self._tokenizer.encode([" ".join(self._tokenizer.words()[:num_words])] * num_texts)
                if not tokens.lengths.all():
                    continue
                began = time.perf_counter()
                await lane.send(tokens.input_ids, tokens.lengths, 0)
                seconds = time.perf_counter() - began
        self.stats._rate_tokens, self.stats._rate_s = float(len(tokens.input_ids)), seconds
        self._bound_queue()

    # -- a call ------------------------------------------------------------------------------------------------------

    async def _embed(
        self,
        texts: Sequence[str],
        prompt: str,
        truncate: bool,
        lane: LaneName,
        deadline: float,
        cancelled: Callable[[], bool] | asyncio.Event | None,
    ) -> Embedded:
        began = time.perf_counter()  # not the loop's clock, which may tick in milliseconds
        if self._draining:
            raise EngineDown("the server is going down")
        if self._active >= self._settings.max_concurrent_requests:
            raise self._overloaded(f"{self._active} calls are in work")
        num_chars = sum(map(len, texts)) + len(texts) * len(prompt)
        if self._refused is not None and self._refused.covers(self._queue, len(texts), num_chars):
            raise self._overloaded(f"{self._queue.tokens} tokens are waiting")
        self._active += 1
        call: _Call | None = None
        try:
            async with asyncio.timeout_at(deadline):
                tokens = await self._tokenized(texts, prompt, num_chars)
                tokenized = time.perf_counter()
                self._check(tokens, truncate)
                call = self._call(tokens, prompt, lane, deadline, cancelled)
                if call.missing:
                    self._wait(call, num_chars)
                    await call.done
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before all of it was computed") from None
        finally:
            self._active -= 1
            if call is not None:
                self._queue.remove(call)
        self._check_vectors(call.vectors)
        seconds = {"tokenize": tokenized - began, "compute": call.compute_s}
        seconds["queue"] = max(0.0, time.perf_counter() - began - sum(seconds.values()))
        return Embedded(
            vectors=call.vectors,
            num_tokens=tokens.lengths.astype(np.int64),
            truncated=tokens.dropped > 0,
            seconds=seconds,
            lane="+".join(dict.fromkeys(call.lanes)),
            in_ring=call.in_ring,
        )

    async def _tokenized(self, texts: Sequence[str], prompt: str, num_chars: int) -> Tokens:
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        if num_chars <= INLINE_CHARS:
            return self._tokenizer.encode(prompted)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenizer.encode, prompted)

    def _check(self, tokens: Tokens, truncate: bool) -> None:
        if not truncate and tokens.dropped.any():
            index = int(np.flatnonzero(tokens.dropped)[0])
            limit = self._tokenizer.spec.max_length
            assert limit is not None
            raise TooLong(index, int(tokens.lengths[index] + tokens.dropped[index]), limit)
        if not tokens.lengths.all():
            raise NotEmbeddable(int(np.flatnonzero(tokens.lengths == 0)[0]), "has no token")

    def _check_vectors(self, vectors: NDArray[np.float32]) -> None:
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(broken):
            raise NotEmbeddable(int(broken[0]), "has a vector that is not finite")

    def _call(
        self,
        tokens: Tokens,
        prompt: str,
        lane: LaneName,
        deadline: float,
        cancelled: Callable[[], bool] | asyncio.Event | None,
    ) -> _Call:
        if isinstance(cancelled, asyncio.Event):
            cancelled = cancelled.is_set
        num_texts = len(tokens.lengths)
        return _Call(
            lengths=tokens.lengths,
            lane=lane,
            deadline=deadline,
            prompt_length=self._prompt_length(prompt),
            is_cancelled=cancelled or (lambda: False),
            tokens=tokens,
            vectors=np.full((num_texts, self.info.dim), np.nan, np.float32),
            missing=num_texts,
            numbers=np.zeros(num_texts, np.int64),
        )

    def _prompt_length(self, prompt: str) -> int:
        """Leading tokens that pooling leaves out, as sentence-transformers counts them: without a last special one."""
        if self._pools_prompt or not prompt:
            return 0
        length = int(self._tokenizer.encode([prompt]).lengths[0])
        return length - bool(self._tokenizer._suffix)

    def _lane_changed(self) -> None:
        is_up = any(lane.is_ready for lane in self._lanes)
        self._down_since = None if is_up else asyncio.get_running_loop().time()
        self._pump()

    def _wait(self, call: _Call, num_chars: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._down_since is not None and now - self._down_since > DOWN_S:
            words = "; ".join(lane.last_words for lane in self._lanes if lane.last_words)
            raise EngineDown(f"the encoder process is down and does not come back: {words}")
        try:
            self._queue.put(call, now)
        except QueueFull as error:
            self._refused = _Refused(self._queue.room, len(call.lengths), num_chars)
            raise self._overloaded(str(error)) from None
        self._pump()

    def _overloaded(self, why: str) -> Overloaded:
        rate = self.stats.tokens_per_s
        ahead = self._queue.tokens + self._flying_tokens
        return Overloaded(max(0.1, ahead / rate) if rate else 1.0, f"the server is overloaded: {why}")

    def _dropped(self, request: Request, why: Literal["deadline", "cancelled"]) -> None:
        assert isinstance(request, _Call)
        if why == "cancelled":
            request.fail(Cancelled("the caller hung up"))
        else:
            request.fail(DeadlineExceeded("the deadline passed before it was computed"))

    # -- batches -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send what can be sent. Called whenever something came to wait, came back, or became ready."""
        loop = asyncio.get_running_loop()
        while self._in_flight < self._depth:
            ready = [lane for lane in self._lanes if lane.is_ready]
            pieces = self._queue.take(loop.time(), device_free=not self._in_flight) if ready else []
            if not pieces:
                break
            self._send(pieces, ready)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._queue.closes_at() if 0 < self._in_flight < self._depth else None
        if due is not None:
            self._timer = loop.call_at(due, self._pump)

    def _send(self, pieces: list[Piece], ready: list[Lane]) -> None:
        batch = _Flight.of(pieces)
        lane = ready[0] if len(ready) == 1 else min(ready, key=lambda one: one.predicted_s(batch.lengths))
        self._in_flight += 1
        self._flying_tokens += len(batch.input_ids)
        future = lane.send(batch.input_ids, batch.lengths, pieces[0].request.prompt_length)
        future.add_done_callback(lambda done: self._landed(batch, lane.name, done))

    def _landed(self, batch: _Flight, lane: str, done: asyncio.Future[Computed]) -> None:
        self._in_flight -= 1
        self._flying_tokens -= len(batch.input_ids)
        error = done.exception()
        if error is None:
            computed = done.result()
            budget = self._queue.limits.max_batch_tokens
            self.stats.count_batch(len(batch.lengths), len(batch.input_ids), computed.seconds, budget)
            self._bound_queue()
            batch.hand_out(computed, lane)
        else:
            for call in batch.calls():
                self._queue.remove(call)
                call.fail(error if isinstance(error, EngineDown) else EngineDown(str(error)))
        self._pump()

    def _bound_queue(self) -> None:
        """What waits longer than half of a deadline had better be told so at once."""
        if self._settings.max_queue_tokens is None:
            limits = self._queue.limits
            half = self.stats.tokens_per_s * self._settings.request_timeout_ms / 2000
            self._queue.limits = replace(limits, max_queue_tokens=max(4 * limits.max_batch_tokens, int(half)))

    def _waiting(self) -> list[_Call]:
        return [call for call in self._queue.requests() if isinstance(call, _Call)]


@dataclass(frozen=True)
class _Refused:
    """A call that did not fit into the queue.

    Under overload most calls are refused, and tokenizing them first took two thirds of what the server process did,
    from the cores that compute. So while the queue has no more room, a call that is no smaller is refused unseen.

    Attributes:
        room: tokens that the queue had left.
        num_texts, num_chars: of the call, prompts included.
    """

    room: int
    num_texts: int
    num_chars: int

    def covers(self, queue: RequestQueue, num_texts: int, num_chars: int) -> bool:
        """An empty queue takes any call."""
        is_full = len(queue) > 0 and queue.room <= self.room
        return is_full and num_texts >= self.num_texts and num_chars >= self.num_chars


@dataclass(frozen=True)
class _Flight:
    """A batch on its way.

    Attributes:
        pieces: whose texts it holds.
        input_ids: (T,) int32, longest text first.
        lengths: (n,) int32.
        places: (n,) where each text of the pieces, in their order, lies in the batch.
    """

    pieces: list[Piece]
    input_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, pieces: list[Piece]) -> _Flight:
        texts: list[NDArray[np.int32]] = []
        for piece in pieces:
            call = piece.request
            assert isinstance(call, _Call)
            tokens = call.tokens
            if len(tokens.lengths) == 1:
                texts.append(tokens.input_ids)
                continue
            starts = tokens.starts
            texts += [tokens.input_ids[starts[i] : starts[i] + tokens.lengths[i]] for i in piece.texts.tolist()]
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        if len(texts) == 1:
            return cls(pieces, texts[0], lengths, np.zeros(1, np.int64))
        order = np.argsort(-lengths, kind="stable")
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return cls(pieces, np.concatenate([texts[i] for i in order.tolist()]), lengths[order], places)

    def calls(self) -> list[_Call]:
        return [piece.request for piece in self.pieces if isinstance(piece.request, _Call)]

    def hand_out(self, computed: Computed, lane: str) -> None:
        first = 0
        for piece, call in zip(self.pieces, self.calls(), strict=True):
            stop = first + len(piece.texts)
            call.take(piece.texts, computed, self.places[first:stop])
            call.lanes.append(lane)
            if not call.missing and not call.done.done():
                call.done.set_result(None)
            first = stop


def _tokens_of(text: str, tokenizer: tokenizers.Tokenizer) -> list[Token]:
    encoding = tokenizer.encode(text)
    rows = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    return [
        Token(number, token, True, None, None) if special else Token(number, text[start:stop], False, start, stop)
        for number, token, special, (start, stop) in rows
    ]
