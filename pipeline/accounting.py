"""One committed shard beside its input -> pieces of both, row against row, and the faults in them.

Every input row has its vectors in the embeddings file or a line in the quarantine, in order, with its id and carried
columns as in the input; where long texts are cut into chunks, the chunks of a row cover its text. Vectors are finite
and, where that is asked for, of unit length.

Both files are read in windows; of a whole shard only row numbers, chunk spans and the quarantine are held. Whether a
vector belongs to its text is not found out here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import ShardError, one_line
from pipeline.reader import read_windows
from pipeline.records import CHUNK_COLUMNS, Shard, Window
from pipeline.shards import Columns
from pipeline.storage import Storage
from pipeline.writer import NULL_TEXT, embedding_type

PIECE_FLOATS = 4 << 20  # vectors held at once: 16 MiB
NO_TEXT = (NULL_TEXT, "not UTF-8")
RERUN = "run `embed-corpus run` again"
REDO = "remove the shard's record in commits/ and run `embed-corpus run` again"
Positions = NDArray[np.int64]


class Faults(list[str]):
    """What is wrong, in the order of finding; of one kind in one place only the first."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def add(self, where: str, found: str, expected: str, do: str, *, kind: str = "") -> None:
        if not kind or (where, kind) not in self._seen:
            self._seen.add((where, kind))
            self.append(f"{where}: found {found}, expected {expected}; {do}")


class Stream:
    """The rows of an open Parquet file, taken in order, in pieces of any size."""

    def __init__(self, file: pq.ParquetFile, batch_rows: int) -> None:
        self._batches = file.iter_batches(batch_rows, use_threads=False)
        self._left = file.schema_arrow.empty_table()
        self.row = 0

    def take(self, num_rows: int) -> pa.Table:
        """The next rows; fewer only at the end."""
        while self._left.num_rows < num_rows and (batch := next(self._batches, None)) is not None:
            self._left = pa.concat_tables([self._left, pa.Table.from_batches([batch])])
        taken, self._left = self._left.slice(0, num_rows), self._left.slice(num_rows)
        self.row += taken.num_rows
        return taken


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one embeddings file.

    Attributes:
        key, path: shard and file.
        row: output row where it begins.
        found: the file's columns.
        rows: (n,) the input row of each, ascending.
        window: where those input rows lie; None where there is no input to compare with.
    """

    key: str
    path: str
    row: int
    found: pa.Table
    rows: Positions
    window: Window | None

    @cached_property
    def vectors(self) -> NDArray[np.float32]:
        """(n, dim)."""
        flat = self.found["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(flat, dtype=np.float32).reshape(self.found.num_rows, -1)

    @cached_property
    def norms(self) -> NDArray[np.float64]:
        """(n,) not finite where the vector is not."""
        norms: NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", self.vectors, self.vectors, dtype=np.float64))
        return norms

    def texts(self) -> list[str | None]:
        """(n,) the text each vector was made from."""
        assert self.window is not None
        texts = [self.window.texts[row - self.window.first_row] for row in self.rows]
        if "chunk" not in self.found.column_names:
            return texts
        spans = zip(texts, self.found["start"].to_pylist(), self.found["end"].to_pylist(), strict=True)
        return [None if text is None else text[start:end] for text, start, end in spans]


class ShardCheck:
    """Checks one shard.

    Args:
        store: the output folder.
        record: its commit record.
        shard: its input, None where that is gone or another one by now: then only the output is checked.
        columns, id_name: what the run read and how it called the key.
        embedding_dtype: stored type.
        chunked: a row may have several vectors.
        faults: gets what is wrong.
    """

    def __init__(
        self,
        store: Storage,
        record: dict[str, Any],
        shard: Shard | None,
        columns: Columns,
        id_name: str,
        embedding_dtype: str,
        chunked: bool,
        faults: Faults,
    ) -> None:
        self._store, self._shard, self._columns, self._id_name = store, shard, columns, id_name
        self._key, self._output, self._record = record["shard"]["key"], record["output"], record
        self._type = embedding_type(self._output["dim"], embedding_dtype)
        self._chunked, self._faults = chunked, faults
        known = shard.num_rows if shard else None
        self._num_rows: int = record["shard"]["num_rows"] if known is None else known

    def pieces(self, unit_tolerance: float | None) -> Iterator[Piece]:
        """The checked rows of the embeddings file; damage ends them and is named.

        Args:
            unit_tolerance: how far a vector's length may be from 1; None for any length.
        """
        try:
            quarantine = self._quarantine()
            with reading(self._store, self._output["path"]) as file:
                self._check_counts(file.metadata.num_rows, quarantine)
                if self._is_as_committed(file):
                    for piece in self._beside(file, quarantine):
                        self._check_columns(piece)
                        self._check_vectors(piece, unit_tolerance)
                        yield piece
        except ShardError as error:
            self._faults.append(f"{error}; mend the input, then {RERUN}")
        except (OSError, KeyError, pa.ArrowException) as error:
            self._faults.add(self._output["path"], f"damage ({one_line(error)})", "files that can be read", REDO)

    def _beside(self, file: pq.ParquetFile, quarantine: pa.Table) -> Iterator[Piece]:
        path, step = self._output["path"], max(1, PIECE_FLOATS // self._output["dim"])
        spans = file.read(columns=list(CHUNK_COLUMNS)) if self._chunked else None
        rows = self._rows_without(quarantine) if spans is None else self._rows_of_chunks(spans, quarantine)
        stream = Stream(file, step)
        for window in read_windows(self._shard, self._columns, self._id_name) if self._shard else ():
            first, end = np.searchsorted(rows, [window.first_row, window.first_row + window.num_rows])
            self._check_quarantine(window, quarantine)
            if spans is not None:
                self._check_spans(window, rows[first:end], spans.slice(first, end - first), quarantine)
            while stream.row < end:
                at, num_rows = stream.row, min(step, int(end) - stream.row)
                yield Piece(self._key, path, at, stream.take(num_rows), rows[at : at + num_rows], window)
        while stream.row < self._output["rows"]:
            at = stream.row
            yield Piece(self._key, path, at, stream.take(step), rows[at : at + step], None)

    # -- whole files ------------------------------------------------------------------------------------------------

    def _quarantine(self) -> pa.Table:
        """id, row, reason; by row."""
        part = self._record.get("quarantine")
        if not part:
            return pa.table({self._id_name: pa.nulls(0), "row": pa.array([], pa.int64()), "reason": pa.nulls(0)})
        with reading(self._store, part["path"]) as file:
            table = file.read(columns=[self._id_name, "row", "reason"])
        steps = np.diff(table["row"].to_numpy())
        if (steps < (0 if self._chunked else 1)).any():
            self._faults.add(part["path"], "rows that repeat or go back", "each row once, in order", REDO)
            table = table.sort_by("row")
        return table

    def _check_counts(self, num_out: int, quarantine: pa.Table) -> None:
        counts, num_quarantined = self._record["counts"], quarantine.num_rows
        extra = counts.get("extra_chunks", 0) if self._chunked else 0
        if num_out + num_quarantined != self._num_rows + extra:
            found = f"{num_out} vectors and {num_quarantined} quarantined rows"
            self._faults.add(self._output["path"], found, f"the {self._num_rows + extra} rows of the input", REDO)
        found_counts = (self._num_rows, num_out, dict(Counter(quarantine["reason"].to_pylist())))
        if found_counts != (counts["rows"], counts["rows_out"], counts["quarantined"]):
            found = "{} rows, {} vectors and quarantined {}".format(*found_counts)
            expected = f"{counts['rows']}, {counts['rows_out']} and {counts['quarantined']} as in its commit record"
            self._faults.add(self._output["path"], found, expected, REDO)

    def _is_as_committed(self, file: pq.ParquetFile) -> bool:
        schema, names = file.schema_arrow, [self._id_name, *self._columns.carried]
        expected = [*names, *(CHUNK_COLUMNS if self._chunked else ()), "embedding"]
        field = pa.field("embedding", self._type, nullable=False)
        if schema.names != expected or not schema.field("embedding").equals(field):
            found = f"columns {', '.join(f'{column.name}: {column.type}' for column in schema)}"
            self._faults.add(self._output["path"], found, f"{', '.join(expected)}: {self._type} not null", REDO)
            return False
        if file.metadata.num_rows != self._output["rows"]:
            found, expected_rows = f"{file.metadata.num_rows} rows", f"{self._output['rows']} as committed"
            self._faults.add(self._output["path"], found, expected_rows, REDO)
            return False
        return True

    def _rows_without(self, quarantine: pa.Table) -> Positions:
        """The input row of each output row: all but the quarantined ones."""
        gone = quarantine["row"].to_numpy()
        rows = np.delete(np.arange(self._num_rows, dtype=np.int64), gone[(gone >= 0) & (gone < self._num_rows)])
        return rows[: self._output["rows"]]

    def _rows_of_chunks(self, spans: pa.Table, quarantine: pa.Table) -> Positions:
        rows: Positions = spans["row"].to_numpy()
        gone = quarantine["row"].to_numpy()
        if (np.diff(rows) < 0).any():
            self._faults.add(self._output["path"], "input rows that go back", "rows in order", REDO)
            return rows[:0]
        missing = np.setdiff1d(np.arange(self._num_rows), np.concatenate([rows, gone]))
        if len(missing):
            found = f"neither a vector nor a quarantine line for row {missing[0]}"
            self._faults.add(self._output["path"], found, f"all {self._num_rows} rows of the input", REDO)
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        numbers = np.arange(len(rows)) - np.repeat(firsts, np.diff(firsts, append=len(rows)))
        wrong = np.flatnonzero((numbers != spans["chunk"].to_numpy()) & ~np.isin(rows, gone))
        if len(wrong):
            found = f"chunk {spans['chunk'][wrong[0]]} of row {rows[wrong[0]]}"
            self._faults.add(self._output["path"], found, f"chunk {numbers[wrong[0]]}", REDO)
        return rows

    # -- window by window -------------------------------------------------------------------------------------------

    def _check_quarantine(self, window: Window, quarantine: pa.Table) -> None:
        gone = quarantine["row"].to_numpy()
        first, end = np.searchsorted(gone, [window.first_row, window.first_row + window.num_rows])
        part, entries = quarantine.slice(first, end - first), gone[first:end] - window.first_row
        path = f"quarantine/{self._key}.parquet"
        at = first_difference(part[self._id_name], window.table[self._id_name].take(pa.array(entries)))
        if at is not None:
            found, row = f"id {part[self._id_name][at]} for row {gone[first + at]}", entries[at]
            self._faults.add(path, found, f"{window.table[self._id_name][row]} as in the input", REDO, kind="ids")
        for entry, reason in zip(entries, part["reason"].to_pylist(), strict=True):
            if reason in NO_TEXT and window.texts[entry] is not None:
                found = f"row {window.first_row + entry} with reason '{reason}'"
                self._faults.add(path, found, "its vector, for it has a text", REDO, kind="reason")

    def _check_spans(self, window: Window, rows: Positions, spans: pa.Table, quarantine: pa.Table) -> None:
        """The chunks of a row leave out no letter and no digit of its text; what has no token may lie between them."""
        texts = [window.texts[row - window.first_row] or "" for row in rows]
        begin, end = spans["start"].to_numpy(), spans["end"].to_numpy()
        is_first, is_last = np.diff(rows, prepend=-1) != 0, np.diff(rows, append=-1) != 0
        covered = np.where(is_first, 0, np.roll(end, 1))
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        wrong = (begin < 0) | (begin > end) | (end > lengths)
        for at in np.flatnonzero((begin > covered) | (is_last & (end < lengths))):
            left_out = texts[at][covered[at] : begin[at]] + (texts[at][end[at] :] if is_last[at] else "")
            wrong[at] |= any(character.isalnum() for character in left_out)
        for at in np.flatnonzero(wrong & ~np.isin(rows, quarantine["row"].to_numpy()))[:1]:
            found = f"a chunk of row {rows[at]} from {begin[at]} to {end[at]} after {covered[at]} of {lengths[at]}"
            self._faults.add(self._output["path"], found, "chunks that cover the text", REDO, kind="spans")

    def _check_columns(self, piece: Piece) -> None:
        if piece.window is None or self._shard is None:
            return
        expected = piece.window.table.take(pa.array(piece.rows - piece.window.first_row))
        for name in expected.column_names:
            at = first_difference(piece.found[name], expected[name])
            if at is not None:
                found = f"{name} {piece.found[name][at]} at output row {piece.row + at}"
                wanted = f"{expected[name][at]} as in row {piece.rows[at]} of {self._shard.path}"
                self._faults.add(piece.path, found, wanted, REDO, kind="order")
        textless = [at for at, text in enumerate(piece.texts()) if text is None]
        if textless:
            found = f"a vector at output row {piece.row + textless[0]}"
            wanted = f"none, row {piece.rows[textless[0]]} has no text"
            self._faults.add(piece.path, found, wanted, REDO, kind="textless")

    def _check_vectors(self, piece: Piece, unit_tolerance: float | None) -> None:
        finite = np.isfinite(piece.norms)
        for at in np.flatnonzero(~finite)[:1]:
            found = f"a vector that is not finite at output row {piece.row + at}"
            self._faults.add(piece.path, found, "finite numbers", REDO, kind="finite")
        if unit_tolerance is not None:
            for at in np.flatnonzero(finite & (np.abs(piece.norms - 1.0) > unit_tolerance))[:1]:
                found = f"a vector of length {piece.norms[at]:.6f} at output row {piece.row + at}"
                self._faults.add(piece.path, found, "length 1, the run normalises", REDO, kind="unit")


@contextlib.contextmanager
def reading(store: Storage, name: str) -> Iterator[pq.ParquetFile]:
    """A file of ours; its page checksums are verified as it is read."""
    with pq.ParquetFile(store.source(name), page_checksum_verification=True, pre_buffer=False) as file:
        yield file


def first_difference(found: pa.ChunkedArray, expected: pa.ChunkedArray) -> int | None:
    """The first position at which two columns differ, the shorter one's end included; None if there is none."""
    if found.equals(expected):
        return None
    ours, theirs = found.to_pylist(), expected.to_pylist()
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other and repr(one) != repr(other):  # a NaN differs from itself, its repr does not
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
