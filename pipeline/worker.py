"""One device's process: ``python -m pipeline.worker`` takes requests on stdin, answers on stdout, a JSON line each.

Three threads hand windows on, so that the device need not wait: one reads and tokenizes (`feed.Feed`), the main one
packs and computes (`Worker`), one writes and commits (`sink.Sink`). While a shard is being written the next one is on
the device and the one after it is read. Between two threads at most one window waits. The coordinator sees only
messages.

When stdin ends the coordinator is gone and the process exits at once, whatever it is doing: nothing that is half done
counts.

    requests   setup {settings} · shard {shard} · queries {texts} · calibrate {texts, window_rows} · stop
    answers    ready {dim, …} · free {unit}: all of it is read, another can be sent · progress {unit, rows, tokens}
               done {unit, record} · bad {unit, message} · vectors {data} · calibrated {lengths, timed, …}
               error {unit, message, exit_code, trace}
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from pipeline import batcher, telemetry
from pipeline.calibration import calibrate
from pipeline.chunker import Chunker
from pipeline.errors import EXIT_BUG, EmbedCorpusError
from pipeline.feed import Feed, InThread, Tokenizing
from pipeline.prefetch import Follow, Prefetch
from pipeline.records import Batch, Tokens
from pipeline.sink import Sink
from pipeline.threads import available_cores
from pipeline.tokenizer import Tokenizer, TokenizerSpec
from pipeline.tuning import Tuning, default_batch_tokens, tuned
from pipeline.units import End, Say, TokenizedWindow, Unit, say_error
from pipeline.worker_settings import WorkerSettings

PROGRESS_EVERY_S = 0.1


class AnyEncoder(Protocol):
    """What the worker needs of an encoder; tests put one that costs nothing in its place.

    One that computes beside the host has ``submit`` too, and ``token_limit`` and ``num_oom_splits``: see
    ``encoder.Encoder``.
    """

    dim: int
    attention: str
    attention_reason: str
    device: str
    dtype: str
    num_parameters: int

    @property
    def padded(self) -> bool: ...
    def tokenizer_spec(self) -> TokenizerSpec: ...
    def encode(self, batch: Batch) -> NDArray[np.float32]: ...
    def computed_tokens(self, batch: Batch) -> int: ...


class Submitted(Protocol):
    """A batch on the device."""

    @property
    def seconds(self) -> float: ...
    def result(self) -> NDArray[np.float32]: ...


class Worker:
    """Does what it is asked.

    Args:
        settings: see there.
        say: sends one answer.
    """

    def __init__(self, settings: WorkerSettings, say: Say) -> None:
        self._settings, self._say = settings, say
        start = time.perf_counter()
        self._encoder = load_encoder(settings)
        load_s = time.perf_counter() - start
        self._tuning = self._tuned()
        tune_s = time.perf_counter() - start - load_s
        self._max_batch_tokens = settings.max_batch_tokens or self._tuning.max_batch_tokens
        spec = self._encoder.tokenizer_spec()
        self._tokenizer = Tokenizer(spec)
        self._chunker = Chunker(spec, settings.chunk_overlap) if settings.long_texts == "chunk" else None
        # What is still to be done with batches on the device and with the windows they complete, in order.
        self._flight: deque[tuple[str, Callable[[], None]]] = deque()
        # One batch is computed while the next is packed; where the host computes, there is nothing to overlap.
        self._max_in_flight = 0 if self._encoder.device == "cpu" else 1
        self._clock, self._since, self._told = telemetry.Clock(), 0.0, 0.0
        say(
            "ready",
            dim=self._encoder.dim,
            attention=self._encoder.attention,
            attention_reason=self._encoder.attention_reason,
            device=self._encoder.device,
            dtype=self._encoder.dtype,
            num_parameters=self._encoder.num_parameters,
            max_batch_tokens=self._max_batch_tokens,
            tuning=self._tuning.to_dict(),
            load_s=round(load_s, 3),
            tune_s=round(tune_s, 3),
        )

    def _tuned(self) -> Tuning:
        device = self._encoder.device
        if self._settings.stand_in is not None or not self._settings.tune:
            return Tuning(default_batch_tokens(device))
        return tuned(self._encoder, device, available_threads())

    def run(self, requests: Iterator[dict[str, Any]]) -> None:
        """Answer requests until they end. Shards overlap; everything else is answered in its turn."""
        settings = self._settings
        sink = Sink(settings, self._encoder, self._tuning.peak_flops_per_s, self._say)
        with (
            self._tokenizing() as tokenizing,
            Prefetch(Feed(settings, self._chunker, tokenizing, self._say).items(requests)) as items,
            Follow(sink.take) as results,
        ):
            self._since = time.perf_counter()
            for item in self._arriving(items):
                if isinstance(item, dict):
                    self._answer(item)
                    self._since = time.perf_counter()
                    continue
                if isinstance(item, TokenizedWindow) and item.unit.error is None:
                    try:
                        self._encode(item)
                    except Exception as error:  # told by the sink, in its turn
                        item.unit.error = error
                if isinstance(item, End):
                    self._account(item.unit)
                self._flight.append(("wait_for_writer", partial(_hand_on, item, results)))
                self._settle(self._max_in_flight)

    def _tokenizing(self) -> contextlib.AbstractContextManager[Tokenizing]:
        if not self._settings.tokenizer_workers:
            return contextlib.nullcontext(InThread(self._tokenizer, self._chunker))
        from pipeline.tokenizer_process import TokenizerProcesses

        count, overlap = self._settings.tokenizer_workers, self._settings.chunk_overlap
        return TokenizerProcesses(self._tokenizer.spec, count, overlap, chunk=self._chunker is not None)

    def _arriving(self, items: Prefetch[Any]) -> Iterator[Any]:
        """The items, and the time spent waiting for them; before a wait, everything in flight is brought home."""
        source = iter(items)
        while True:
            if not items.is_waiting:
                self._settle(0)
            start = time.perf_counter()
            item = next(source, None)
            if item is None:
                return
            if not isinstance(item, dict):
                # Time before the unit was there to be waited for is nobody's.
                idle = max(0.0, min(item.unit.began, time.perf_counter()) - start)
                self._clock.add("wait_for_input", time.perf_counter() - start - idle)
                self._since += idle
            yield item

    def _account(self, unit: Unit) -> None:
        """All time since the unit before it was done with belongs to this one; so the units' times add up."""
        now = time.perf_counter()
        unit.seconds, unit.wall_s = self._clock.seconds, now - self._since
        self._clock, self._since = telemetry.Clock(), now

    def _settle(self, keep: int) -> None:
        """Bring home all but the last ``keep`` batches, and hand on the windows that are complete."""
        batches = sum(stage == "encode" for stage, _ in self._flight)
        while self._flight and (batches > keep or self._flight[0][0] != "encode"):
            stage, step = self._flight.popleft()
            batches -= stage == "encode"
            with self._clock.stage(stage):
                step()

    def _encode(self, item: TokenizedWindow) -> None:
        """Compute what is not known of a window; its vectors are there when the flight has been settled."""
        unit, tokens, clock = item.unit, item.tokens, self._clock
        item.vectors = np.full((len(tokens.lengths), self._encoder.dim), np.nan, dtype=np.float32)
        todo = np.flatnonzero(tokens.lengths)
        if unit.previous is not None:
            with clock.stage("reuse"):
                known = unit.previous.fill(item.hashes, item.vectors)
            todo = todo[~known[todo]]
            unit.counts.reused += int(known.sum())
        landing = _Landing(item, int(tokens.lengths[todo].sum()), self._progress)
        for batch in clock.waiting("pack", self._batches(tokens, todo)):
            splits = getattr(self._encoder, "num_oom_splits", 0)
            with clock.stage("encode"):
                submitted = _submit(self._encoder, batch)
            unit.counts.oom_splits += getattr(self._encoder, "num_oom_splits", 0) - splits
            unit.counts.batches += 1
            unit.counts.tokens += batch.num_tokens
            squares = float((batch.lengths.astype(np.int64) ** 2).sum())
            unit.flops += self._tuning.flops(batch.num_tokens, squares)
            unit.counts.computed_tokens += self._encoder.computed_tokens(batch)
            self._flight.append(("encode", partial(landing.land, batch, submitted)))
            self._settle(self._max_in_flight)

    def _progress(self, unit: Unit, rows: int) -> None:
        """Tell how far a unit is, but not so often that telling it takes time: a batch may take half a millisecond."""
        now = time.perf_counter()
        if now - self._told >= PROGRESS_EVERY_S:
            self._told = now
            self._say("progress", unit=unit.shard.unit, rows=rows, tokens=unit.counts.tokens)

    def _batches(self, tokens: Tokens, todo: NDArray[np.int64]) -> Iterator[Batch]:
        """The texts ``todo``, each in exactly one batch, longest first.

        Where the device turns out to have less room than the budget, what is left is planned anew.
        """
        while len(todo):
            budget, done = self._budget(), 0
            for chosen in batcher.plan_batches(tokens.lengths[todo], budget, padded=self._encoder.padded):
                yield batcher.pack(tokens, todo[chosen])
                done += len(chosen)
                if self._budget() < budget:
                    break
            # Batches are cut from the order of lengths, so what was not done is its end.
            todo = todo[np.argsort(-tokens.lengths[todo].astype(np.int64), kind="stable")][done:]

    def _budget(self) -> int:
        limit: int | None = getattr(self._encoder, "token_limit", None)
        return self._max_batch_tokens if limit is None else min(limit, self._max_batch_tokens)

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            if request["do"] == "queries":
                vectors = self.embed_queries(request["texts"])
                data = base64.b64encode(vectors.tobytes()).decode("ascii")
                self._say("vectors", dim=vectors.shape[1], data=data)
            elif request["do"] == "calibrate":
                self._say("calibrated", **self.calibrate(request["texts"], request["window_rows"]))
        except Exception as error:
            say_error(self._say, error)

    def embed_queries(self, texts: list[str]) -> NDArray[np.float32]:
        """(n, dim) float32, in the order given."""
        tokens = self._tokenizer.encode(texts)
        vectors = np.full((len(texts), self._encoder.dim), np.nan, dtype=np.float32)
        for batch in self._batches(tokens, np.flatnonzero(tokens.lengths)):
            vectors[batch.texts] = self._encoder.encode(batch)
        return vectors

    def calibrate(self, texts: list[str | None], window_rows: int) -> dict[str, Any]:
        """Lengths and cost of a sample, for a plan."""
        budget = self._max_batch_tokens
        measured = calibrate(self._encoder, self._tokenizer, self._chunker, texts, window_rows, budget)
        return {**measured, "peak_memory_bytes": telemetry.peak_memory_bytes()}


class _Landing:
    """Batches of one window as they come back from the device."""

    def __init__(self, item: TokenizedWindow, num_tokens: int, progress: Callable[[Unit, int], None]) -> None:
        self._item, self._num_tokens, self._progress, self._done = item, num_tokens, progress, 0

    def land(self, batch: Batch, submitted: Submitted) -> None:
        """Put a batch's vectors where they belong; never raises."""
        item, unit = self._item, self._item.unit
        try:
            item.vectors[batch.texts] = submitted.result()
        except Exception as error:  # told by the sink, in its turn
            unit.error = unit.error or error
            return
        unit.device_s += submitted.seconds
        self._done += batch.num_tokens
        # The longest texts come first: tokens tell how far the window is, rows would not.
        rows = unit.counts.rows + item.window.num_input_rows * self._done // self._num_tokens
        self._progress(unit, rows)


@dataclass(frozen=True)
class _Computed:
    """A batch of an encoder that computes where it is called."""

    vectors: NDArray[np.float32]
    seconds: float

    def result(self) -> NDArray[np.float32]:
        return self.vectors


def _submit(encoder: AnyEncoder, batch: Batch) -> Submitted:
    submit: Callable[[Batch], Submitted] | None = getattr(encoder, "submit", None)
    if submit is not None:
        return submit(batch)
    start = time.perf_counter()
    vectors = encoder.encode(batch)
    return _Computed(vectors, time.perf_counter() - start)


def _hand_on(item: TokenizedWindow | End, results: Follow[TokenizedWindow | End]) -> None:
    if isinstance(item, TokenizedWindow):
        _count(item)
    results.put(item)


def _count(part: TokenizedWindow) -> None:
    counts = part.unit.counts
    embedded = part.text_of_row[part.text_of_row >= 0]
    dropped = part.tokens.dropped[embedded]
    steps = np.ceil(np.log2(part.tokens.lengths[part.tokens.lengths > 0])).astype(np.int64)
    part.unit.lengths += np.bincount(steps, minlength=len(part.unit.lengths))
    counts.rows += part.window.num_input_rows
    counts.extra_chunks += part.window.num_rows - part.window.num_input_rows
    counts.texts += len(part.tokens.lengths)
    counts.duplicates += len(embedded) - int((part.tokens.lengths > 0).sum())
    counts.truncated_texts += int((dropped > 0).sum())
    counts.dropped_tokens += int(dropped.sum())


def available_threads() -> int:
    """That torch computes with, as the coordinator has set it."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or available_cores()


def load_encoder(settings: WorkerSettings) -> AnyEncoder:
    if settings.stand_in is not None:
        import importlib

        module, _, function = settings.stand_in.partition(":")
        stand_in: AnyEncoder = getattr(importlib.import_module(module), function)(settings.encoder)
        return stand_in
    from pipeline.encoder import Encoder

    return Encoder.load(settings.encoder)


def main() -> int:
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up between messages
    threading.Thread(target=_listen, args=(sys.stdin, requests), daemon=True, name="requests").start()
    lock = threading.Lock()

    def say(event: str, **values: Any) -> None:
        with lock:
            answers.write(json.dumps({"event": event, **values}) + "\n")
            answers.flush()

    setup = requests.get()
    try:
        worker = Worker(WorkerSettings.from_json(setup["settings"]), say)
    except Exception as error:
        say_error(say, error)
        return error.exit_code if isinstance(error, EmbedCorpusError) else EXIT_BUG
    worker.run(iter(requests.get, None))
    return 0


def _listen(stdin: TextIO, requests: queue.Queue[dict[str, Any]]) -> None:
    for line in stdin:
        requests.put(json.loads(line))
    os._exit(0)  # the coordinator is gone: stop in mid-batch; temporary files are swept by the next run


if __name__ == "__main__":
    sys.exit(main())
