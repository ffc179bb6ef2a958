"""One shard into windows of consecutive rows, read as a stream: only the wanted columns, never the whole file.

A window ends at ``WINDOW_ROWS`` rows or ``WINDOW_BYTES`` of text, whichever comes first, so memory depends on neither
the shard's length nor its row groups. Every row of the shard appears in exactly one window, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import ShardError
from pipeline.records import Shard, Window
from pipeline.shards import Columns, check_columns, open_parquet, plain_type

WINDOW_ROWS = 16_384
WINDOW_BYTES = 32 * 1024 * 1024
MIN_ROWS_AT_ONCE = 16
MAX_ROWS_AT_ONCE = 2_048  # decoded in one step; a row can be large and its size is unknown before


def read_windows(shard: Shard, columns: Columns, id_name: str) -> Iterator[Window]:
    """Windows of ``shard``, or of the part of it that is asked for.

    Args:
        shard: what to read.
        columns: which columns.
        id_name: name of the key in the output; the key is ``<shard key>:<row>`` where ``columns.id`` is None.

    Raises:
        ShardError: the file is damaged or not what its footer said; the message names the shard.
    """
    with _errors_of(shard), open_parquet(shard.path) as file:
        check_columns(file.schema_arrow, columns, shard.partitions)
        pending: list[pa.Table] = []
        rows = size = 0
        first_row = 0 if shard.part is None else shard.part.first_row
        for table in _tables(file, shard, columns, id_name, first_row):
            pending.append(table)
            rows += table.num_rows
            size += table.nbytes
            if rows >= WINDOW_ROWS or size >= WINDOW_BYTES:
                yield _window(pending, first_row)
                first_row += rows
                pending, rows, size = [], 0, 0
        if rows:
            yield _window(pending, first_row)


def read_texts(shard: Shard, columns: Columns, row_group: int, rows: NDArray[np.int64]) -> list[str | None]:
    """Single texts of one row group, which is read as a stream up to the last of them.

    Args:
        shard, columns: as above.
        row_group: number of the group.
        rows: (n,) ascending positions in the group.

    Returns:
        n texts; None where there is none to embed.

    Raises:
        ShardError: as above.
    """
    found: list[str | None] = []
    with _errors_of(shard), open_parquet(shard.path) as file:
        size = _rows_at_once(file, [columns.text])
        first_row = 0
        for batch in file.iter_batches(size, row_groups=[row_group], columns=[columns.text], use_threads=False):
            if len(found) == len(rows):
                break
            here = rows[len(found) : np.searchsorted(rows, first_row + batch.num_rows)] - first_row
            text, _ = _as_text(_column(batch, columns.text, shard).take(pa.array(here)))
            found.extend(text.to_pylist())
            first_row += batch.num_rows
    return found


@contextlib.contextmanager
def _errors_of(shard: Shard) -> Iterator[None]:
    """Whatever reading raises is a ShardError that names the shard."""
    try:
        yield
    except ShardError as error:
        raise ShardError(f"{shard.path}: {error}") from None
    except (ConnectionError, PermissionError) as error:  # of an object store, and it names the shard
        raise ShardError(str(error)) from None
    except (OSError, pa.ArrowException) as error:
        raise ShardError(f"{shard.path}: damaged data: {' '.join(str(error).split())}") from None


def _tables(file: pq.ParquetFile, shard: Shard, columns: Columns, id_name: str, first_row: int) -> Iterator[pa.Table]:
    """Small tables of the output's columns, then ``_text`` and ``_invalid``."""
    wanted = [name for name in dict.fromkeys(columns.names()) if name not in shard.partitions]
    part = shard.part
    groups = None if part is None else range(part.first_row_group, part.end_row_group)
    at_once = _rows_at_once(file, wanted)
    for batch in file.iter_batches(batch_size=at_once, row_groups=groups, columns=wanted, use_threads=False):
        arrays: dict[str, pa.Array] = {}
        if columns.id is None:
            # Arrow formats the numbers: a Python f-string a row would be the reader's main cost.
            numbers = pc.cast(pa.array(range(first_row, first_row + batch.num_rows), pa.int64()), pa.string())
            arrays[id_name] = pc.binary_join_element_wise(pa.scalar(shard.key), numbers, ":")
        else:
            arrays[id_name] = _decoded(_column(batch, columns.id, shard))
        for name in columns.carried:
            arrays[name] = _decoded(_column(batch, name, shard))
        arrays["_text"], arrays["_invalid"] = _as_text(_column(batch, columns.text, shard))
        yield pa.table(arrays)
        first_row += batch.num_rows


def _rows_at_once(file: pq.ParquetFile, wanted: list[str]) -> int:
    """Fewer rows where rows are large, judged by the footer and by the first rows.

    The footer alone is not enough: it tells encoded sizes, and a dictionary hides how large the texts are.
    """
    metadata = file.metadata
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    bytes_a_row = size // max(1, metadata.num_rows)
    for first in file.iter_batches(batch_size=MIN_ROWS_AT_ONCE, columns=wanted, use_threads=False):
        bytes_a_row = max(bytes_a_row, first.nbytes // max(1, first.num_rows))
        break
    return int(min(MAX_ROWS_AT_ONCE, max(MIN_ROWS_AT_ONCE, WINDOW_BYTES // max(1, bytes_a_row))))


def _column(batch: pa.RecordBatch, name: str, shard: Shard) -> pa.Array:
    if name in shard.partitions:
        # As Spark, Hive and pyarrow datasets have it, the folder's value wins over a column of the same name.
        return pa.array([shard.partitions[name]] * batch.num_rows, pa.string())
    index = batch.schema.get_field_index(name)
    if index >= 0:
        return batch.column(index)
    head, *rest = name.split(".")
    node = batch.column(head)
    for part in rest:
        node = pc.struct_field(node, part)  # unlike .field(), keeps a null struct's text null
    return node


def _decoded(array: pa.Array) -> pa.Array:
    kind = plain_type(array.type)
    return array if kind == array.type else array.cast(kind)


def _as_text(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """(text, mask of the rows whose bytes are not UTF-8); such rows have a null text."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_null(array.type):
        return array.cast(pa.large_string()), pa.array([False] * len(array))
    # Through bytes, so that a string column is checked as well: a writer can store anything in one.
    raw = array.cast(pa.large_binary())
    try:
        return raw.cast(pa.large_string()), pa.array(np.zeros(len(raw), dtype=bool))
    except pa.ArrowInvalid:
        texts = [_utf8(value) for value in raw.to_pylist()]
        text = pa.array(texts, pa.large_string())
        return text, pc.and_(pc.is_valid(raw), pc.is_null(text))


def _utf8(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _window(tables: list[pa.Table], first_row: int) -> Window:
    table = pa.concat_tables(tables).combine_chunks()
    rejected = {int(row): "not UTF-8" for row in np.flatnonzero(table.column("_invalid").to_numpy())}
    return Window(first_row, table.drop_columns(["_text", "_invalid"]), table.column("_text").to_pylist(), rejected)


def output_schema(shard: Shard, columns: Columns, id_name: str) -> pa.Schema:
    """Names and types of the id and carried columns, for a shard without a single row."""
    with open_parquet(shard.path) as file:
        types = check_columns(file.schema_arrow, columns, shard.partitions)
    names = {id_name: pa.string()} if columns.id is None else {id_name: types.pop(columns.id)}
    return pa.schema([*names.items(), *types.items()])
