"""Vectors back into input order and into one Parquet file a shard; rows without a vector into the quarantine.

rows in = rows out + quarantined, checked before anything becomes visible. Files are written under a temporary name,
re-opened and compared with what was meant, and renamed; the commit record that makes them count is not written here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import OutputError
from pipeline.records import Shard, Window
from pipeline.storage import Output, sha256_file

MIN_ROW_GROUP_ROWS = 8_192  # with windows of at most 18k rows a row group stays below 32k
NULL_TEXT = "null text"
NO_TOKENS = "no tokens"
NON_FINITE = "non-finite"


def embedding_type(dim: int, dtype: str) -> pa.DataType:
    """``fixed_size_list<float not null>[dim]``; a child that cannot be null reads 1.3-1.5 times faster."""
    return pa.list_(pa.field("element", pa.float16() if dtype == "float16" else pa.float32(), nullable=False), dim)


class ShardWriter:
    """Writes ``embeddings/<key>.parquet`` and, if need be, ``quarantine/<key>.parquet``.

    Use as a context manager: leaving it without ``finish`` removes what was written.
    """

    def __init__(self, output: Output, shard: Shard, dim: int, dtype: str, id_name: str) -> None:
        self._output, self._shard, self._dim, self._dtype, self._id_name = output, shard, dim, dtype, id_name
        self._name = f"embeddings/{shard.key}.parquet"
        self._quarantine_name = f"quarantine/{shard.key}.parquet"
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._rejected: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._temporary: list[Path] = []
        self.rows_in = self.rows_out = 0
        self.quarantined: dict[str, int] = {}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, pa.ArrowException):  # a full disk fails here a second time
                self._writer.close()
        for path in self._temporary:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OutputError(
                f"--output {self._output.root}: cannot write {self._name} ({error}); make room, then run again"
            ) from None

    def write(self, window: Window, text_of_row: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Append a window.

        Args:
            window: the rows.
            text_of_row: (num_rows,) which text a row has, -1 for none.
            vectors: (num_texts, dim) float32; a text without any token or with a non-finite vector is a row of NaN.
        """
        has_text = text_of_row >= 0
        keep = has_text.copy()
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(vectors).all(axis=1))
        keep[has_text] = finite[text_of_row[has_text]]
        self.rows_in += window.num_rows
        if not keep.all():
            self._quarantine(window, np.flatnonzero(~keep), has_text)
        kept = np.flatnonzero(keep)
        if len(kept):
            self._append(window.table if keep.all() else window.table.take(kept), vectors[text_of_row[kept]])

    def _append(self, table: pa.Table, vectors: NDArray[np.float32]) -> None:
        kind = embedding_type(self._dim, self._dtype)
        flat = np.ascontiguousarray(vectors, dtype=np.float16 if self._dtype == "float16" else np.float32).reshape(-1)
        column = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)
        self._pending.append(table.append_column(pa.field("embedding", kind, nullable=False), column))
        self._pending_rows += len(vectors)
        self.rows_out += len(vectors)
        if self._pending_rows >= MIN_ROW_GROUP_ROWS:
            self._flush()

    def _quarantine(self, window: Window, positions: NDArray[np.int64], has_text: NDArray[np.bool_]) -> None:
        reasons = []
        for position in positions:
            if has_text[position]:
                reason = NON_FINITE
            else:
                reason = window.rejected.get(int(position), NULL_TEXT)
            reasons.append(reason)
            self.quarantined[reason] = self.quarantined.get(reason, 0) + 1
        columns = {
            self._id_name: window.table.column(self._id_name).take(pa.array(positions)),
            "row": pa.array(positions + window.first_row, pa.int64()),
            "reason": pa.array(reasons, pa.string()),
        }
        self._rejected.append(pa.table(columns))

    def _flush(self) -> None:
        table = pa.concat_tables(self._pending)
        self._pending, self._pending_rows = [], 0
        if self._writer is None:
            temporary = self._output.temporary(self._name)
            self._temporary.append(temporary)
            self._writer = pq.ParquetWriter(temporary, table.schema, **self._layout(table.schema))
        self._writer.write_table(table.combine_chunks(), row_group_size=max(1, table.num_rows))

    def _layout(self, schema: pa.Schema) -> dict[str, Any]:
        others = [name for name in schema.names if name != "embedding"]
        layout: dict[str, Any] = {
            "compression": "zstd",
            "compression_level": 1,
            "use_dictionary": others or False,
            "write_statistics": others or False,
            "write_page_checksum": True,
        }
        if self._dtype == "float32":  # DuckDB 2.0 cannot read a byte-stream-split float16
            layout["column_encoding"] = {"embedding.list.element": "BYTE_STREAM_SPLIT"}
        return layout

    def finish(self, empty: pa.Schema) -> dict[str, Any]:
        """Make the files appear; returns the ``output`` and ``quarantine`` parts of the commit record.

        Args:
            empty: schema of the id and carried columns, used where the shard has no row with a vector.
        """
        total = self.rows_out + sum(self.quarantined.values())
        assert self.rows_in == total, f"{self.rows_in} rows in, {total} rows out and quarantined. This is a bug."
        if self._writer is None and not self._pending:
            kind = embedding_type(self._dim, self._dtype)
            self._pending.append(empty.append(pa.field("embedding", kind, nullable=False)).empty_table())
        if self._pending:
            self._flush()
        assert self._writer is not None
        self._writer.close()
        quarantine = self._publish_quarantine()
        output = self._publish(self._temporary[0], self._name, self.rows_out)
        return {"output": {**output, "dim": self._dim}, "quarantine": quarantine}

    def _publish_quarantine(self) -> dict[str, Any] | None:
        if not self._rejected:
            self._output.remove(self._quarantine_name)  # of an earlier version of this shard
            return None
        table = pa.concat_tables(self._rejected)
        temporary = self._output.temporary(self._quarantine_name)
        self._temporary.append(temporary)
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        return self._publish(temporary, self._quarantine_name, table.num_rows)

    def _publish(self, temporary: Path, name: str, rows: int) -> dict[str, Any]:
        with pq.ParquetFile(temporary) as file:
            found = file.metadata.num_rows
        if found != rows:
            raise OSError(f"{name}: {found} rows on the disk after writing {rows}")
        part = {"path": name, "rows": rows, "bytes": os.path.getsize(temporary), "sha256": sha256_file(temporary)}
        self._output.publish(temporary, name)
        return part
