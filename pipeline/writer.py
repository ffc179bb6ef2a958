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

from pipeline import reuse
from pipeline.errors import OutputError
from pipeline.records import Shard, Window
from pipeline.storage import Storage, sha256_file

MIN_ROW_GROUP_ROWS = 8_192  # with windows of at most 18k rows a row group stays below 32k
NULL_TEXT = "null text"
NO_TOKENS = "no tokens"
NON_FINITE = "non-finite"


def embedding_type(dim: int, dtype: str) -> pa.DataType:
    """``fixed_size_list<float not null>[dim]``; a child that cannot be null reads 1.3-1.5 times faster."""
    return pa.list_(pa.field("element", pa.float16() if dtype == "float16" else pa.float32(), nullable=False), dim)


class ShardWriter:
    """Writes ``embeddings/<key>.parquet``, its token hashes and, if need be, ``quarantine/<key>.parquet``.

    Use as a context manager: leaving it without ``finish`` removes what was written.
    """

    def __init__(self, output: Storage, shard: Shard, dim: int, dtype: str, id_name: str) -> None:
        self._output, self._dim, self._dtype, self._id_name = output, dim, dtype, id_name
        self._embeddings = TableFile(output, shard.output_name("embeddings"), dtype)
        self._hashes = TableFile(output, shard.output_name("reuse"))
        self._quarantine = TableFile(output, shard.output_name("quarantine"))
        self._files = (self._embeddings, self._hashes, self._quarantine)
        self.rows_in = 0
        self.quarantined: dict[str, int] = {}

    @property
    def rows_out(self) -> int:
        return self._embeddings.rows

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.discard()
        if isinstance(error, OSError):
            raise self.failure(error) from None

    def discard(self) -> None:
        """Remove what was written and not published."""
        for file in self._files:
            file.discard()

    def failure(self, error: OSError) -> OutputError:
        """What an error while writing means."""
        where = f"--output {self._output.root}: cannot write {self._embeddings.name}"
        return OutputError(f"{where} ({error}); make room, then run again")

    def write(
        self,
        window: Window,
        text_of_row: NDArray[np.int64],
        vectors: NDArray[np.float32],
        hashes: NDArray[np.uint64] | None = None,
    ) -> None:
        """Append a window.

        Args:
            window: the rows.
            text_of_row: (num_rows,) which text a row has, -1 for none.
            vectors: (num_texts, dim) float32; a text with a non-finite vector is a row of NaN.
            hashes: (num_texts, 2) what each text is recognised by when the shard changes.
        """
        has_text = text_of_row >= 0
        keep = has_text.copy()
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(vectors).all(axis=1))
        keep[has_text] = finite[text_of_row[has_text]]
        self.rows_in += window.num_rows
        if not keep.all():
            self._reject(window, np.flatnonzero(~keep), has_text)
        kept = np.flatnonzero(keep)
        if len(kept):
            texts = text_of_row[kept]
            self._embeddings.append(self._rows(window.table if keep.all() else window.table.take(kept), vectors[texts]))
            if hashes is not None:
                self._hashes.append(reuse.hash_table(hashes[texts]))

    def _rows(self, table: pa.Table, vectors: NDArray[np.float32]) -> pa.Table:
        kind = embedding_type(self._dim, self._dtype)
        flat = np.ascontiguousarray(vectors, dtype=np.float16 if self._dtype == "float16" else np.float32).reshape(-1)
        column = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)
        return table.append_column(pa.field("embedding", kind, nullable=False), column)

    def _reject(self, window: Window, positions: NDArray[np.int64], has_text: NDArray[np.bool_]) -> None:
        reasons = [NON_FINITE if has_text[at] else window.rejected.get(int(at), NULL_TEXT) for at in positions]
        for reason in reasons:
            self.quarantined[reason] = self.quarantined.get(reason, 0) + 1
        columns = {
            self._id_name: window.table.column(self._id_name).take(pa.array(positions)),
            "row": pa.array(window.rows[positions], pa.int64()),
            "reason": pa.array(reasons, pa.string()),
        }
        self._quarantine.append(pa.table(columns))

    def finish(self, empty: pa.Schema) -> dict[str, Any]:
        """Make the files appear; returns the ``output``, ``quarantine`` and ``reuse`` parts of the commit record.

        Args:
            empty: schema of the id and carried columns, used where the shard has no row with a vector.
        """
        total = self.rows_out + sum(self.quarantined.values())
        assert self.rows_in == total, f"{self.rows_in} rows in, {total} rows out and quarantined. This is a bug."
        if not self.rows_out:
            kind = embedding_type(self._dim, self._dtype)
            self._embeddings.append(empty.append(pa.field("embedding", kind, nullable=False)).empty_table())
        parts = {"reuse": self._hashes.publish(), "quarantine": self._quarantine.publish()}
        return {"output": {**(self._embeddings.publish() or {}), "dim": self._dim}, **parts}


class TableFile:
    """One Parquet file in the making: rows are gathered into row groups, nothing is visible before ``publish``."""

    def __init__(self, output: Storage, name: str, dtype: str = "") -> None:
        self._output, self.name, self._dtype = output, name, dtype
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._temporary: Path | None = None
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def append(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        if self._pending_rows >= MIN_ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        table = pa.concat_tables(self._pending)
        self._pending, self._pending_rows = [], 0
        if self._writer is None:
            self._temporary = self._output.temporary(self.name)
            self._writer = pq.ParquetWriter(self._temporary, table.schema, **_layout(table.schema, self._dtype))
        self._writer.write_table(table.combine_chunks(), row_group_size=max(1, table.num_rows))

    def publish(self) -> dict[str, Any] | None:
        """The file's part of the commit record; None, and no file, where nothing was appended."""
        if self._pending:
            self._flush()
        if self._writer is None or self._temporary is None:
            self._output.remove(self.name)  # of an earlier version of this shard
            return None
        self._writer.close()
        with pq.ParquetFile(self._temporary) as file:
            found = file.metadata.num_rows
        if found != self.rows:
            raise OSError(f"{self.name}: {found} rows on the disk after writing {self.rows}")
        size, digest = os.path.getsize(self._temporary), sha256_file(self._temporary)
        self._output.publish(self._temporary, self.name)
        return {"path": self.name, "rows": self.rows, "bytes": size, "sha256": digest}

    def discard(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, pa.ArrowException):  # a full disk fails here a second time
                self._writer.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)


def _layout(schema: pa.Schema, dtype: str) -> dict[str, Any]:
    plain = [name for name in schema.names if name not in ("embedding", reuse.COLUMN)]
    layout: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": plain or False,
        "write_statistics": plain or False,
        "write_page_checksum": True,
    }
    if dtype == "float32":  # DuckDB 2.0 cannot read a byte-stream-split float16
        layout["column_encoding"] = {"embedding.list.element": "BYTE_STREAM_SPLIT"}
    return layout
