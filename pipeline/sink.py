"""Computed windows into files and commit records, in a thread of its own: the writing half of a worker."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from pipeline import telemetry
from pipeline.chunker import with_chunk_columns
from pipeline.errors import ShardError
from pipeline.joiner import join
from pipeline.ledger import Ledger
from pipeline.reader import output_schema
from pipeline.records import Shard
from pipeline.storage import open_output
from pipeline.units import End, Say, TokenizedWindow, Unit, say_error
from pipeline.worker_settings import WorkerSettings
from pipeline.writer import ShardWriter


class Facts(Protocol):
    """What a commit record says of the encoder."""

    dim: int
    attention: str
    device: str
    dtype: str


class Sink:
    """Computed windows into files and commit records; tells what became of every unit, in order."""

    def __init__(self, settings: WorkerSettings, encoder: Facts, peak_flops_per_s: float, say: Say) -> None:
        self._settings, self._encoder, self._say = settings, encoder, say
        self._peak = peak_flops_per_s
        self._output = open_output(settings.output) if settings.output else None
        self._writer: ShardWriter | None = None
        self._schema: pa.Schema | None = None

    def take(self, item: TokenizedWindow | End) -> None:
        """Never raises: what goes wrong is the unit's error."""
        unit, record = item.unit, None
        try:
            if unit.error is None:
                with self._writing(unit):
                    if isinstance(item, End):
                        record = self._finish(unit)
                    else:
                        self._write(unit, item)
        except Exception as error:
            unit.error = error
        if isinstance(item, End):
            self._close(unit)
            if unit.error is not None or record is None:
                say_error(self._say, unit.error or AssertionError("no record of a finished unit"), unit.shard.unit)
            else:
                self._say("done", unit=unit.shard.unit, record=record)

    @contextlib.contextmanager
    def _writing(self, unit: Unit) -> Iterator[None]:
        with unit.beside.stage("write"):
            try:
                yield
            except OSError as error:
                raise self._writer_of(unit).failure(error) from None

    def _writer_of(self, unit: Unit) -> ShardWriter:
        if self._writer is None:
            assert self._output is not None
            settings = self._settings
            dim, dtype = self._encoder.dim, settings.embedding_dtype
            self._writer = ShardWriter(self._output, unit.shard, dim, dtype, settings.id_name)
        return self._writer

    def _write(self, unit: Unit, item: TokenizedWindow) -> None:
        self._schema = item.window.table.schema
        self._writer_of(unit).write(item.window, item.text_of_row, item.vectors, item.hashes)

    def _finish(self, unit: Unit) -> dict[str, Any]:
        """Publish and commit a unit; returns its commit record."""
        shard, counts, settings = unit.shard, unit.counts, self._settings
        assert self._output is not None
        if unit.done is not None:
            return unit.done
        if unit.is_join:
            return join(self._output, shard, settings.embedding_dtype, settings.fingerprint)
        if shard.rows_to_read is not None and counts.rows != shard.rows_to_read:
            raise ShardError(f"{shard.path}: {counts.rows} rows read, its footer says {shard.rows_to_read}")
        if unit.previous is not None:
            unit.previous.close()
        writer, ledger, start = self._writer_of(unit), Ledger(self._output), time.perf_counter()
        # From here on the old files are replaced: their record must go first, so that the two never disagree.
        ledger.forget(shard.key, shard.part_number)
        files = writer.finish(self._schema or self._empty_schema(shard))
        counts.rows_out, counts.quarantined = writer.rows_out, writer.quarantined
        files["output"]["chunked"] = settings.long_texts == "chunk"
        busy = {**unit.beside.seconds, "device": unit.device_s}
        busy["write"] = busy.get("write", 0.0) + time.perf_counter() - start
        measured = telemetry.shard_telemetry(counts, unit.seconds, busy, unit.wall_s, unit.flops, self._peak)
        price = settings.price_per_hour
        record = {
            "shard": {"key": shard.key, **shard.identity()},
            **files,
            **measured,
            "length_histogram": {str(2**i): int(count) for i, count in enumerate(unit.lengths) if count},
            "cost": None if price is None else unit.wall_s / 3600 * price,
            **self._made_with(),
        }
        return ledger.commit(record)

    def _empty_schema(self, shard: Shard) -> pa.Schema:
        schema = output_schema(shard, self._settings.columns, self._settings.id_name)
        return with_chunk_columns(schema) if self._settings.long_texts == "chunk" else schema

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

    def _close(self, unit: Unit) -> None:
        """Forget the unit; what it has not published is removed."""
        if self._writer is not None:
            self._writer.discard()
        if unit.previous is not None:
            unit.previous.close()
        self._writer = self._schema = None
