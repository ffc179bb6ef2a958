"""One device's process: ``python -m pipeline.worker`` takes requests on stdin, answers on stdout, a JSON line each.

A shard goes through reader → tokenizer → batcher → encoder → writer → commit record here; the coordinator sees only
messages. When stdin ends the coordinator is gone and the process exits at once, whatever it is doing: nothing that is
half done counts.

    requests   setup {settings} · shard {shard} · queries {texts} · stop
    answers    ready {dim, …} · progress {key, rows, tokens} · done {record} · bad {key, message}
               vectors {data} · error {message, exit_code, trace}
"""

from __future__ import annotations

import base64
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from pipeline import batcher, telemetry
from pipeline.errors import EXIT_BUG, EmbedCorpusError, ShardError, one_line
from pipeline.ledger import Ledger
from pipeline.prefetch import Prefetch
from pipeline.reader import output_schema, read_windows
from pipeline.records import Batch, Counters, Shard, Tokens, Window
from pipeline.storage import Output
from pipeline.tokenizer import Tokenizer, TokenizerSpec
from pipeline.worker_settings import WorkerSettings
from pipeline.writer import NO_TOKENS, ShardWriter


class AnyEncoder(Protocol):
    """What the worker needs of an encoder; tests put one that costs nothing in its place."""

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


class Worker:
    """Does what it is asked, one request at a time.

    Args:
        settings: see there.
        say: sends one answer.
    """

    def __init__(self, settings: WorkerSettings, say: Any) -> None:
        self._settings, self._say = settings, say
        start = time.perf_counter()
        self._encoder = load_encoder(settings)
        self._tokenizer = Tokenizer(self._encoder.tokenizer_spec())
        say(
            "ready",
            dim=self._encoder.dim,
            attention=self._encoder.attention,
            attention_reason=self._encoder.attention_reason,
            device=self._encoder.device,
            dtype=self._encoder.dtype,
            num_parameters=self._encoder.num_parameters,
            load_s=round(time.perf_counter() - start, 3),
        )

    def embed_shard(self, shard: Shard) -> dict[str, Any]:
        """Embed one shard, publish its files and commit it; returns the commit record.

        Raises:
            ShardError: the shard's data is bad.
            OutputError: the output cannot be written.
        """
        settings, output, ledger = self._settings, Output(self._settings.output), Ledger(self._settings.output)
        ledger.forget(shard.key)
        counts, clock, beside, start = Counters(), telemetry.Clock(), telemetry.Clock(), time.perf_counter()
        windows = beside.waiting("read", read_windows(shard, settings.columns, settings.id_name))
        writer = ShardWriter(output, shard, self._encoder.dim, settings.embedding_dtype, settings.id_name)
        schema = None
        with writer, Prefetch(self._tokenized(windows, beside)) as tokenized:
            for window, text_of_row, tokens in clock.waiting("wait_for_input", iter(tokenized)):
                schema = window.table.schema
                vectors = self._encode(shard, tokens, counts, clock)
                with clock.stage("write"):
                    writer.write(window, text_of_row, vectors)
                _count(counts, window, text_of_row, tokens)
            with clock.stage("write"):
                files = writer.finish(schema or output_schema(shard, settings.columns, settings.id_name))
        counts.rows_out, counts.quarantined = writer.rows_out, writer.quarantined
        if shard.num_rows is not None and counts.rows != shard.num_rows:
            raise ShardError(f"{shard.path}: {counts.rows} rows read, its footer says {shard.num_rows}")
        wall_s = time.perf_counter() - start
        record = {
            "shard": {"key": shard.key, **shard.identity()},
            "fingerprint": settings.fingerprint,
            **files,
            **telemetry.shard_telemetry(counts, clock.seconds, beside.seconds, wall_s),
            "device": self._encoder.device,
            "attention": self._encoder.attention,
            "dtype": self._encoder.dtype,
            "peak_memory_bytes": telemetry.peak_memory_bytes(),
            "host": socket.gethostname(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        ledger.commit(record)
        return record

    def _tokenized(
        self, windows: Iterator[Window], beside: telemetry.Clock
    ) -> Iterator[tuple[Window, NDArray[np.int64], Tokens]]:
        for window in windows:
            with beside.stage("tokenize"):
                texts, text_of_row = distinct(window.texts)
                tokens = self._tokenizer.encode(texts)
                _reject_tokenless(window, text_of_row, tokens)
            yield window, text_of_row, tokens

    def _encode(self, shard: Shard, tokens: Tokens, counts: Counters, clock: telemetry.Clock) -> NDArray[np.float32]:
        """(num_texts, dim) float32; NaN where a text has no token."""
        vectors = np.full((len(tokens.lengths), self._encoder.dim), np.nan, dtype=np.float32)
        rows, tokens_done = counts.rows, counts.tokens
        for batch in clock.waiting("pack", self._batches(tokens)):
            with clock.stage("encode"):
                vectors[batch.texts] = self._encoder.encode(batch)
            counts.batches += 1
            counts.computed_tokens += self._encoder.computed_tokens(batch)
            rows, tokens_done = rows + batch.num_texts, tokens_done + batch.num_tokens
            self._say("progress", key=shard.key, rows=rows, tokens=tokens_done)
        return vectors

    def _batches(self, tokens: Tokens) -> Iterator[Batch]:
        """Every text that has a token, in exactly one batch, longest first."""
        nonempty = np.flatnonzero(tokens.lengths)
        for chosen in batcher.plan_batches(
            tokens.lengths[nonempty], self._settings.max_batch_tokens, padded=self._encoder.padded
        ):
            yield batcher.pack(tokens, nonempty[chosen])

    def embed_queries(self, texts: list[str]) -> NDArray[np.float32]:
        """(n, dim) float32, in the order given."""
        tokens = self._tokenizer.encode(texts)
        vectors = np.full((len(texts), self._encoder.dim), np.nan, dtype=np.float32)
        for batch in self._batches(tokens):
            vectors[batch.texts] = self._encoder.encode(batch)
        return vectors


def load_encoder(settings: WorkerSettings) -> AnyEncoder:
    if settings.stand_in is not None:
        import importlib

        module, _, function = settings.stand_in.partition(":")
        stand_in: AnyEncoder = getattr(importlib.import_module(module), function)(settings.encoder)
        return stand_in
    from pipeline.encoder import Encoder

    return Encoder.load(settings.encoder)


def distinct(texts: list[str | None]) -> tuple[list[str], NDArray[np.int64]]:
    """Each different text once, in order of first appearance, and which of them every row has (-1: none)."""
    position: dict[str, int] = {}
    rows = np.fromiter(
        (-1 if text is None else position.setdefault(text, len(position)) for text in texts), np.int64, len(texts)
    )
    return list(position), rows


def _reject_tokenless(window: Window, text_of_row: NDArray[np.int64], tokens: Tokens) -> None:
    empty = tokens.lengths == 0
    if empty.any():
        for row in np.flatnonzero(text_of_row >= 0):
            if empty[text_of_row[row]]:
                window.rejected[int(row)] = NO_TOKENS
                text_of_row[row] = -1


def _count(counts: Counters, window: Window, text_of_row: NDArray[np.int64], tokens: Tokens) -> None:
    counts.rows += window.num_rows
    counts.texts += len(tokens.lengths)
    counts.duplicates += int((text_of_row >= 0).sum()) - int((tokens.lengths > 0).sum())
    counts.tokens += len(tokens.input_ids)
    counts.truncated_texts += tokens.num_truncated
    counts.dropped_tokens += tokens.num_dropped


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

    worker: Worker | None = None
    while True:
        request = requests.get()
        try:
            if request["do"] == "setup":
                worker = Worker(WorkerSettings.from_json(request["settings"]), say)
            elif request["do"] == "shard":
                assert worker is not None
                shard = Shard(**request["shard"])
                try:
                    say("done", record=worker.embed_shard(shard))
                except ShardError as error:
                    say("bad", key=shard.key, message=str(error))
            elif request["do"] == "queries":
                assert worker is not None
                vectors = worker.embed_queries(request["texts"])
                say("vectors", dim=vectors.shape[1], data=base64.b64encode(vectors.tobytes()).decode("ascii"))
            elif request["do"] == "stop":
                return 0
        except EmbedCorpusError as error:
            say("error", message=str(error), exit_code=error.exit_code, trace=None)
        except Exception as error:
            trace = traceback.format_exc()
            say("error", message=f"{type(error).__name__}: {one_line(error)}", exit_code=EXIT_BUG, trace=trace)


def _listen(stdin: TextIO, requests: queue.Queue[dict[str, Any]]) -> None:
    for line in stdin:
        requests.put(json.loads(line))
    os._exit(0)  # the coordinator is gone: stop in mid-batch; temporary files are swept by the next run


if __name__ == "__main__":
    sys.exit(main())
