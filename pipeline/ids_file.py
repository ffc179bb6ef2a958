"""The ids file of an index -> the FAISS ids of the rows that a user calls by their own ids.

Only row groups whose statistics admit one of the ids are read: few of them where ids ascend, all of them where not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.rows import Positions

SHOWN = 3


def rows_called(ids: pq.ParquetFile, names: Any) -> Positions:
    """(n,) FAISS ids of the rows with these ids.

    Args:
        ids: the file: faiss_id, id, shard and row of each vector.
        names: an id, or a list or array of ids; text stands for an id of any type, as a command line has it.

    Raises:
        ConfigError: an id of another type, of no row, or of several.
    """
    several = isinstance(names, (list, tuple, np.ndarray, pa.Array, pa.ChunkedArray))
    kind = ids.schema_arrow.field("id").type
    wanted = pa.array([_typed(name, kind) for name in (names if several else [names])], kind)
    found = ids.schema_arrow.empty_table()
    for group in range(ids.num_row_groups):
        if len(wanted) and _may_hold(ids.metadata.row_group(group), wanted):
            lines = ids.read_row_group(group)
            found = pa.concat_tables([found, lines.filter(pc.is_in(lines.column("id"), value_set=wanted))])
    places: dict[Any, list[dict[str, Any]]] = {}
    for hit in found.to_pylist():
        places.setdefault(hit["id"], []).append(hit)
    return np.array([_only_one(name, places.get(name, [])) for name in wanted.to_pylist()], dtype=np.int64)


def _typed(name: Any, kind: pa.DataType) -> Any:
    plain = name.as_py() if isinstance(name, pa.Scalar) else name.item() if isinstance(name, np.generic) else name
    try:
        if isinstance(plain, float) and pa.types.is_integer(kind):
            raise TypeError("pyarrow would cut it")
        return pa.scalar(plain).cast(kind) if isinstance(plain, str) else pa.scalar(plain, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise ConfigError(f"like {plain!r}: ids of this index are {kind}") from None


def _may_hold(group: Any, wanted: pa.Array) -> bool:
    columns = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    statistics = columns["id"].statistics
    if statistics is None or not statistics.has_min_max:
        return True
    try:
        low, high = pa.scalar(statistics.min, wanted.type), pa.scalar(statistics.max, wanted.type)
        inside = pc.and_(pc.greater_equal(wanted, low), pc.less_equal(wanted, high))
    except (pa.ArrowException, TypeError, ValueError):  # a type whose statistics come as another
        return True
    return bool(pc.any(inside).as_py())


def _only_one(name: Any, hits: list[dict[str, Any]]) -> int:
    if len(hits) == 1:
        return int(hits[0]["faiss_id"])
    if not hits:
        raise ConfigError(f"like {name!r}: no row of the index has this id")
    places = ", ".join(f"{hit['shard']}:{hit['row']}" for hit in hits[:SHOWN])
    more = ", …" if len(hits) > SHOWN else ""
    raise ConfigError(f"like {name!r}: {len(hits)} rows have this id ({places}{more}); expected one")
