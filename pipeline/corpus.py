"""An output folder -> its committed vectors in one order, block by block, and the table that names each of them.

A vector has two numbers. Its *position* counts through all committed files, in the natural order of their keys. Its
*FAISS id* is ``shard ordinal << 32 | row of the output file``; a shard keeps its ordinal from one build to the next and
no other shard ever gets it, so a shard's vectors are one range of ids whatever is added beside it.

A file that is not as committed or cannot be read, and a vector that is not finite, end in an ``IndexingError`` that
names them. FAISS is not needed here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import ledger
from pipeline.errors import ConfigError, IndexingError
from pipeline.storage import Storage, reading

BLOCK_FLOATS = 4 << 20
IDS_ROW_GROUP = 8192
NORM_TOLERANCE = 1e-3
REDO = "remove the shard's commit and run `embed-corpus run` again"

Vectors = NDArray[np.float32]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class File:
    """One committed embeddings file.

    Attributes:
        quarantine: sha256 of the file of rows without a vector, None when all have one; tells a file whose vectors are
            unchanged but belong to other input rows.
        quarantine_path: where that file is.
        num_input_rows: rows of the shard; None where the commit does not say.
        start: how many vectors the files before it hold.
        chunked: an input row may have several vectors; the column ``row`` says which one has which.
    """

    key: str
    ordinal: int
    path: str
    rows: int
    sha256: str
    quarantine: str | None
    quarantine_path: str | None
    num_input_rows: int | None
    start: int
    chunked: bool = False

    def record(self) -> dict[str, Any]:
        """What ``index.json`` says of the file."""
        return {name: getattr(self, name) for name in ("key", "ordinal", "path", "rows", "sha256", "quarantine")}

    def faiss_ids(self, row: int, num_rows: int) -> Positions:
        """(num_rows,) int64, the FAISS ids from output row ``row`` on."""
        return (self.ordinal << 32) + np.arange(row, row + num_rows, dtype=np.int64)


class Block(NamedTuple):
    """Consecutive vectors of one file, (n, dim) float32; ``row`` is where in the file they begin."""

    file: File
    row: int
    vectors: Vectors

    @property
    def position(self) -> int:
        return self.file.start + self.row

    @property
    def faiss_ids(self) -> Positions:
        """(n,) int64."""
        return self.file.faiss_ids(self.row, len(self.vectors))

    def after(self, num_rows: int) -> Block:
        """Without its first rows."""
        return Block(self.file, self.row + num_rows, self.vectors[num_rows:]) if num_rows else self

    def before(self, num_rows: int) -> Block:
        """Its first rows."""
        return self._replace(vectors=self.vectors[:num_rows])


@dataclass(frozen=True)
class Corpus:
    """All committed files, in the natural order of their keys; at least one vector.

    Attributes:
        num_lost: commit records that do not count, because what they name is not there.
    """

    store: Storage
    fingerprint: str
    dim: int
    files: list[File]
    num_lost: int

    @property
    def num_vectors(self) -> int:
        return self.files[-1].start + self.files[-1].rows if self.files else 0

    def positions(self, faiss_ids: Positions) -> Positions:
        """The position of each FAISS id, int64 of the same shape; -1, FAISS' word for nothing found, stays -1."""
        starts = np.zeros(max(file.ordinal for file in self.files) + 1, dtype=np.int64)
        for file in self.files:
            starts[file.ordinal] = file.start
        return np.where(faiss_ids < 0, -1, starts[faiss_ids >> 32] + (faiss_ids & 0xFFFFFFFF))

    def faiss_ids(self, positions: Positions) -> Positions:
        """The FAISS id at each position, int64 of the same shape."""
        starts = np.array([file.start for file in self.files])
        ordinals = np.array([file.ordinal for file in self.files], dtype=np.int64)
        at = np.searchsorted(starts, positions, side="right") - 1  # the last of equals: files before it are empty
        return np.asarray((ordinals[at] << 32) + positions - starts[at])

    def part(self, ordinals: Container[int]) -> Corpus:
        """Only the files of these ordinals, with positions of their own."""
        chosen, start = [], 0
        for file in self.files:
            if file.ordinal in ordinals:
                chosen.append(replace(file, start=start))
                start += file.rows
        return replace(self, files=chosen)

    def blocks(self, wanted: Positions | None = None, *, first: int = 0) -> Iterator[Block]:
        """Every vector in order.

        Args:
            wanted: ascending positions: only the row groups that hold one of them.
            first: the position to begin at.
        """
        batch_rows = max(1, BLOCK_FLOATS // self.dim)
        for file in self.files:
            if file.start + file.rows <= first or not _touches(wanted, file.start, file.rows):
                continue
            with self.open(file) as parquet:
                for group, row, rows in _row_groups(parquet):
                    if file.start + row + rows > first and _touches(wanted, file.start + row, rows):
                        for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=["embedding"]):
                            block = Block(file, row, _vectors(batch.column("embedding"), self.dim))
                            row += batch.num_rows
                            if file.start + row > first:
                                yield block.after(max(0, first - block.position))

    def vectors_at(self, positions: Positions) -> Vectors:
        """(n, dim) float32, the vectors at n positions; reads only the row groups that hold them."""
        sample = Sample(positions, self.dim)
        for block in self.blocks(np.sort(positions)):
            sample.add(block)
        return sample.vectors

    @contextlib.contextmanager
    def open(self, file: File) -> Iterator[pq.ParquetFile]:
        """An embeddings file whose shape is as committed; a damaged page raises when it is read."""
        with _open(self.store, file.path) as parquet:
            found, kind = parquet.metadata.num_rows, parquet.schema_arrow.field("embedding").type
            if found != file.rows or not pa.types.is_fixed_size_list(kind) or kind.list_size != self.dim:
                raise IndexingError(
                    f"{self.store.location(file.path)}: found {found} rows of {kind}, expected {file.rows} rows of "
                    f"{self.dim} dimensions as committed; {REDO}"
                )
            yield parquet

    def id_field(self) -> pa.Field:
        """Name and type of the ids, the first column of every file, once all files are as committed.

        A key that changes its type from file to file is another key; one that is null in all rows has none.
        """
        first = None
        for file in self.files:
            with self.open(file) as parquet:
                found = parquet.schema_arrow.field(0)
            kind = found.type.value_type if pa.types.is_dictionary(found.type) else found.type
            if first is None or (pa.types.is_null(first.type) and found.name == first.name):
                first = pa.field(found.name, kind)
            if found.name != first.name or not (kind == first.type or pa.types.is_null(kind)):
                raise IndexingError(
                    f"{self.store.location(file.path)}: the id column is {found.name!r} ({kind}), but {first.name!r} "
                    f"({first.type}) in {self.files[0].path}; give all shards one name and type"
                )
        return first


def open_corpus(store: Storage, previous: dict[str, Any]) -> Corpus:
    """The committed files of an output; ``previous`` is its index.json, whose shards keep their ordinals.

    Raises:
        ConfigError: nothing is committed, or the shards were made with different configurations.
        IndexingError: the shards hold no vector.
    """
    run, records = ledger.read_run(store), ledger.Ledger(store)
    commits = records.commits()
    if not commits:
        raise ConfigError(f"nothing committed in {store.root}; run `embed-corpus run` with this --output first")
    dim = int(commits[0]["output"]["dim"])
    for commit in commits:
        # One index, one embedding space: vectors of two models have the same shape and nothing in common.
        _check(store, commit, "fingerprint", commit["fingerprint"], run["fingerprint"])
        _check(store, commit, "dimensions", commit["output"]["dim"], dim)
    ordinals = _ordinals(previous, [commit["shard"]["key"] for commit in commits])
    starts = itertools.accumulate((commit["output"]["rows"] for commit in commits), initial=0)
    files = [
        _file(commit, ordinals[commit["shard"]["key"]], start) for commit, start in zip(commits, starts, strict=False)
    ]
    corpus = Corpus(store, str(run["fingerprint"]), dim, files, len(records.keys()) - len(commits))
    if not corpus.num_vectors:
        raise IndexingError(
            f"{store.root}: the {len(files)} committed shards hold no vector, so there is nothing to index; "
            f"see {store.root}/quarantine for why each row got none"
        )
    return corpus


def _check(store: Storage, commit: dict[str, Any], what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise ConfigError(
            f"{store.root}: shard {commit['shard']['key']} was embedded with {what} {found}, expected {expected}; "
            "run `embed-corpus run` again so that all shards have one configuration"
        )


def _file(commit: dict[str, Any], ordinal: int, start: int) -> File:
    shard, output, quarantine = commit["shard"], commit["output"], commit.get("quarantine") or {}
    return File(
        key=shard["key"],
        ordinal=ordinal,
        path=output["path"],
        rows=output["rows"],
        sha256=output["sha256"],
        quarantine=quarantine.get("sha256"),
        quarantine_path=quarantine.get("path"),
        num_input_rows=shard.get("num_rows"),
        start=start,
        chunked=bool(output.get("chunked")),
    )


def _ordinals(previous: dict[str, Any], keys: list[str]) -> dict[str, int]:
    known = {shard["key"]: shard["ordinal"] for shard in previous.get("shards", [])}
    unused = itertools.count(previous.get("next_ordinal", 0))
    return {key: known[key] if key in known else next(unused) for key in keys}


def _open(store: Storage, name: str) -> contextlib.AbstractContextManager[pq.ParquetFile]:
    return reading(store, name, lambda what: IndexingError(f"{what}; {REDO}"))


def _row_groups(parquet: pq.ParquetFile) -> Iterator[tuple[int, int, int]]:
    """Number, first row and rows of each row group."""
    row = 0
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        yield group, row, rows
        row += rows


def _touches(ascending: Positions | None, start: int, rows: int) -> bool:
    if ascending is None:
        return True
    first, last = np.searchsorted(ascending, [start, start + rows])
    return bool(last > first)


def _vectors(column: Any, dim: int) -> Vectors:
    # Arrow's flatten drops null rows, which would shift every later vector to another id.
    if column.null_count:
        raise pa.ArrowInvalid("null embedding")
    flat = column.flatten()
    return np.ascontiguousarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(-1, dim)


class Sample:
    """The vectors at some positions, gathered from the blocks that pass by.

    Attributes:
        vectors: (n, dim) float32 or another type, in the order of the n positions.
    """

    def __init__(self, positions: Positions, dim: int, dtype: Any = np.float32) -> None:
        self.vectors = np.empty((len(positions), dim), dtype=dtype)
        self._order = np.argsort(positions, kind="stable")
        self._ascending = positions[self._order]

    def add(self, block: Block) -> None:
        low, high = np.searchsorted(self._ascending, [block.position, block.position + len(block.vectors)])
        with np.errstate(over="ignore"):  # a type may be too small for long vectors: see who asks for it
            self.vectors[self._order[low:high]] = block.vectors[self._ascending[low:high] - block.position]


def scan(blocks: Iterable[Block], samples: Sequence[Sample] = ()) -> bool:
    """Let vectors pass by: fills the samples; returns whether all are of unit length.

    Raises:
        IndexingError: a vector is not finite.
    """
    normalized = True
    for block in blocks:
        # float64, so that a long finite vector does not look infinite
        norms = np.sqrt(np.einsum("ij,ij->i", block.vectors, block.vectors, dtype=np.float64))
        bad = np.flatnonzero(~np.isfinite(norms))
        if len(bad):
            # FAISS would count such a row and never return it, or return it first (SQ8)
            raise IndexingError(f"{block.file.path}: vector at output row {block.row + bad[0]} is not finite; {REDO}")
        normalized &= bool((np.abs(norms - 1.0) <= NORM_TOLERANCE).all())
        for sample in samples:
            sample.add(block)
    return normalized


def write_ids(corpus: Corpus, key: pa.Field, path: Path) -> None:
    """faiss_id, id (``key``), shard, row of every vector, as Parquet: line p is position p."""
    schema = pa.schema(
        [
            pa.field("faiss_id", pa.int64(), nullable=False),
            pa.field("id", key.type),
            pa.field("shard", pa.dictionary(pa.int32(), pa.string()), nullable=False),
            pa.field("row", pa.int64(), nullable=False),
        ]
    )
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, write_page_checksum=True) as writer:
        for file in corpus.files:
            for table in _id_tables(corpus, file, key.name, schema):
                writer.write_table(table, row_group_size=IDS_ROW_GROUP)


def _id_tables(corpus: Corpus, file: File, id_column: str, schema: pa.Schema) -> Iterator[pa.Table]:
    with corpus.open(file) as parquet:
        # Read as a column where a row may have several vectors, made up from what is missing elsewhere.
        input_rows, row = None if file.chunked else _input_rows(corpus.store, file), 0
        columns = [id_column, "row"] if file.chunked else [id_column]
        for batch in parquet.iter_batches(8 * IDS_ROW_GROUP, columns=columns):
            n = batch.num_rows
            shard = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, dtype=np.int32)), pa.array([file.key]))
            ids = batch.column(id_column).cast(schema.field("id").type)
            rows = batch.column("row") if input_rows is None else pa.array(input_rows[row : row + n])
            yield pa.Table.from_arrays([pa.array(file.faiss_ids(row, n)), ids, shard, rows], schema=schema)
            row += n


def _input_rows(store: Storage, file: File) -> Positions:
    """(rows,) int64, the input row of each vector: all rows but the quarantined ones, in order."""
    missing = np.empty(0, dtype=np.int64)
    if file.quarantine_path:
        with _open(store, file.quarantine_path) as parquet:
            missing = np.unique(parquet.read(columns=["row"]).column("row").to_numpy())
    total = file.rows + len(missing)
    if file.num_input_rows not in (None, total) or (len(missing) and missing[-1] >= total):
        raise IndexingError(
            f"{file.key}: {file.rows} vectors and {len(missing)} quarantined rows do not make the "
            f"{file.num_input_rows} rows of the shard; {REDO}"
        )
    return np.delete(np.arange(total, dtype=np.int64), missing)
