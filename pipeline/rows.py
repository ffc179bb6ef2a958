"""A Parquet file -> single rows of it, in any order, read by the row groups that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Positions = NDArray[np.int64]


def group_starts(parquet: pq.ParquetFile) -> Positions:
    """(num_row_groups + 1,) int64, the first row of each row group, and the number of rows."""
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    return np.cumsum([0, *sizes], dtype=np.int64)


def take(parquet: pq.ParquetFile, rows: Positions, columns: list[str]) -> pa.Table:
    """Rows of a file in the order asked for; a row may be asked for twice."""
    starts = group_starts(parquet)

    def read(group: int, hits: Positions) -> pa.Table:
        table = parquet.read_row_group(group, columns=columns).select(columns)
        return table.take(pa.array(rows[hits] - starts[group]))

    groups = np.searchsorted(starts[1:], rows, side="right")
    return by_group(groups, read, parquet.schema_arrow.empty_table().select(columns))


def by_group(groups: NDArray[Any], read: Callable[[int, Positions], pa.Table], empty: pa.Table) -> pa.Table:
    """One row for each of (n,) ``groups``, in their order.

    Args:
        groups: which group each row is in.
        read: reads the rows of one group, given their places among the n.
        empty: what comes back for n = 0.
    """
    if not len(groups):
        return empty
    tables = [read(int(group), np.flatnonzero(groups == group)) for group in np.unique(groups)]
    order = np.argsort(groups, kind="stable")
    return pa.concat_tables(tables, promote_options="permissive").take(pa.array(np.argsort(order)))
