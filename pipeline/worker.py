"""One device's process: ``python -m pipeline.worker`` takes requests on stdin, answers on stdout, a JSON line each.

A shard goes through reader → tokenizer → batcher → encoder → writer → commit record here; the coordinator sees only
messages. When stdin ends the coordinator is gone and the process exits at once, whatever it is doing: nothing that is
half done counts.

    requests   setup {settings} · shard {shard} · queries {texts} · calibrate {texts, window_rows} · stop
    answers    ready {dim, …} · progress {key, rows, tokens} · done {record} · bad {key, message}
               vectors {data} · calibrated {lengths, timed, …} · error {message, exit_code, trace}
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
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import batcher, telemetry
from pipeline.calibration import calibrate
from pipeline.chunker import Chunker, with_chunk_columns
from pipeline.errors import EXIT_BUG, EmbedCorpusError, ShardError, one_line
from pipeline.ledger import Ledger, is_of
from pipeline.prefetch import Prefetch
from pipeline.reader import output_schema, read_windows
from pipeline.records import Batch, Counters, Shard, Tokens, Window
from pipeline.reuse import PreviousVectors, open_previous, token_hashes
from pipeline.storage import open_output
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


@dataclass(frozen=True)
class TokenizedWindow:
    """A window on its way to the encoder.

    Attributes:
        window: its rows.
        text_of_row: (num_rows,) int64, which text each row has; -1 for none.
        tokens: of the window's different texts.
        hashes: (num_texts, 2) uint64, what each text is recognised by.
    """

    window: Window
    text_of_row: NDArray[np.int64]
    tokens: Tokens
    hashes: NDArray[np.uint64]


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
        spec = self._encoder.tokenizer_spec()
        self._tokenizer = Tokenizer(spec)
        self._chunker = Chunker(spec, settings.chunk_overlap) if settings.long_texts == "chunk" else None
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
        settings, output = self._settings, open_output(self._settings.output)
        ledger = Ledger(output)
        record = ledger.record(shard.key)
        if is_of(record, shard, settings.fingerprint):  # by another run since this one began
            return record
        previous = open_previous(output, record, settings.fingerprint)
        counts, clock, beside, start = Counters(), telemetry.Clock(), telemetry.Clock(), time.perf_counter()
        windows = beside.waiting("read", read_windows(shard, settings.columns, settings.id_name))
        writer = ShardWriter(output, shard, self._encoder.dim, settings.embedding_dtype, settings.id_name)
        schema = None
        with writer, Prefetch(self._tokenized(windows, beside)) as tokenized:
            for part in clock.waiting("wait_for_input", iter(tokenized)):
                schema = part.window.table.schema
                vectors = self._encode(shard, part, previous, counts, clock)
                with clock.stage("write"):
                    writer.write(part.window, part.text_of_row, vectors, part.hashes)
                _count(counts, part)
            if previous is not None:
                previous.close()
            if shard.num_rows is not None and counts.rows != shard.num_rows:
                raise ShardError(f"{shard.path}: {counts.rows} rows read, its footer says {shard.num_rows}")
            # From here on the old files are replaced: their record must go first, so that the two never disagree.
            ledger.forget(shard.key)
            with clock.stage("write"):
                files = writer.finish(schema or self._empty_schema(shard))
        counts.rows_out, counts.quarantined = writer.rows_out, writer.quarantined
        files["output"]["chunked"] = self._chunker is not None
        measured = telemetry.shard_telemetry(counts, clock.seconds, beside.seconds, time.perf_counter() - start)
        record = {"shard": {"key": shard.key, **shard.identity()}, **files, **measured, **self._made_with()}
        return ledger.commit(record)

    def _made_with(self) -> dict[str, Any]:
        """What a commit record says of this worker."""
        return {
            "fingerprint": self._settings.fingerprint,
            "device": self._encoder.device,
            "attention": self._encoder.attention,
            "dtype": self._encoder.dtype,
            "peak_memory_bytes": telemetry.peak_memory_bytes(),
            "host": socket.gethostname(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _empty_schema(self, shard: Shard) -> pa.Schema:
        schema = output_schema(shard, self._settings.columns, self._settings.id_name)
        return schema if self._chunker is None else with_chunk_columns(schema)

    def _tokenized(self, windows: Iterator[Window], beside: telemetry.Clock) -> Iterator[TokenizedWindow]:
        for window in windows:
            if self._chunker is not None:
                with beside.stage("chunk"):
                    window = self._chunker.expand(window)
            with beside.stage("tokenize"):
                texts, text_of_row = distinct(window.texts)
                tokens = self._tokenizer.encode(texts)
                _reject_tokenless(window, text_of_row, tokens)
                hashes = token_hashes(tokens)
            yield TokenizedWindow(window, text_of_row, tokens, hashes)

    def _encode(
        self,
        shard: Shard,
        part: TokenizedWindow,
        previous: PreviousVectors | None,
        counts: Counters,
        clock: telemetry.Clock,
    ) -> NDArray[np.float32]:
        """(num_texts, dim) float32; NaN where a text has no token."""
        tokens = part.tokens
        vectors = np.full((len(tokens.lengths), self._encoder.dim), np.nan, dtype=np.float32)
        todo = np.flatnonzero(tokens.lengths)
        if previous is not None:
            with clock.stage("reuse"):
                known = previous.fill(part.hashes, vectors)
            todo = todo[~known[todo]]
            counts.reused += int(known.sum())
        num_tokens, done = int(tokens.lengths[todo].sum()), 0
        for batch in clock.waiting("pack", self._batches(tokens, todo)):
            with clock.stage("encode"):
                vectors[batch.texts] = self._encoder.encode(batch)
            counts.batches += 1
            counts.tokens += batch.num_tokens
            counts.computed_tokens += self._encoder.computed_tokens(batch)
            done += batch.num_tokens
            # The longest texts come first: tokens tell how far the window is, rows would not.
            rows = counts.rows + part.window.num_input_rows * done // num_tokens
            self._say("progress", key=shard.key, rows=rows, tokens=counts.tokens)
        return vectors

    def _batches(self, tokens: Tokens, todo: NDArray[np.int64]) -> Iterator[Batch]:
        """The texts ``todo``, each in exactly one batch, longest first."""
        budget = self._settings.max_batch_tokens
        for chosen in batcher.plan_batches(tokens.lengths[todo], budget, padded=self._encoder.padded):
            yield batcher.pack(tokens, todo[chosen])

    def embed_queries(self, texts: list[str]) -> NDArray[np.float32]:
        """(n, dim) float32, in the order given."""
        tokens = self._tokenizer.encode(texts)
        vectors = np.full((len(texts), self._encoder.dim), np.nan, dtype=np.float32)
        for batch in self._batches(tokens, np.flatnonzero(tokens.lengths)):
            vectors[batch.texts] = self._encoder.encode(batch)
        return vectors

    def calibrate(self, texts: list[str | None], window_rows: int) -> dict[str, Any]:
        """Lengths and cost of a sample, for a plan."""
        budget = self._settings.max_batch_tokens
        measured = calibrate(self._encoder, self._tokenizer, self._chunker, texts, window_rows, budget)
        return {**measured, "peak_memory_bytes": telemetry.peak_memory_bytes()}


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


def _count(counts: Counters, part: TokenizedWindow) -> None:
    embedded = part.text_of_row[part.text_of_row >= 0]
    dropped = part.tokens.dropped[embedded]
    counts.rows += part.window.num_input_rows
    counts.extra_chunks += part.window.num_rows - part.window.num_input_rows
    counts.texts += len(part.tokens.lengths)
    counts.duplicates += len(embedded) - int((part.tokens.lengths > 0).sum())
    counts.truncated_texts += int((dropped > 0).sum())
    counts.dropped_tokens += int(dropped.sum())


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
            elif request["do"] == "calibrate":
                assert worker is not None
                say("calibrated", **worker.calibrate(request["texts"], request["window_rows"]))
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
