"""The files of a benchmark: the texts of any input as one Parquet file, and two outputs compared row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.reader import read_windows
from pipeline.records import Shard
from pipeline.shards import Columns

ROWS_AT_ONCE = 8_192
SCHEMA = pa.schema({"id": pa.int64(), "text": pa.string()})


def copy_texts(shards: Sequence[Shard], text_column: str, rows: int | None, target: str) -> int:
    """Write the texts to embed as one file of ``id`` (0, 1, …) and ``text``; a row without a text is left out.

    Args:
        shards: checked, so that their rows are known.
        text_column: which column is the text.
        rows: how many to take in all, each shard's first ones in proportion; None for all.
        target: the file to write.

    Returns:
        How many rows were left out.

    Raises:
        ConfigError: no row has one.
    """
    columns, written, seen = Columns(text_column, None), 0, 0
    with pq.ParquetWriter(target, SCHEMA) as writer:
        for shard, quota in zip(shards, quotas([shard.num_rows or 0 for shard in shards], rows), strict=True):
            for texts in _first_texts(shard, columns, quota):
                present = [text for text in texts if text is not None]
                ids = range(written, written + len(present))
                writer.write_table(pa.table({"id": ids, "text": present}, schema=SCHEMA))
                written, seen = written + len(present), seen + len(texts)
    if not written:
        raise ConfigError(f"{shards[0].path}: no row of the {seen:,} taken has a text in '{text_column}'")
    return seen - written


def quotas(num_rows: Sequence[int], wanted: int | None) -> list[int]:
    """How many rows to take of each shard, in proportion: 4 of ``[6, 2]`` are ``[3, 1]``."""
    total = sum(num_rows)
    wanted = total if wanted is None else min(wanted, total)
    ends = [0, *(int(end) * wanted // max(1, total) for end in np.cumsum(num_rows))]
    return [end - start for start, end in itertools.pairwise(ends)]


def _first_texts(shard: Shard, columns: Columns, quota: int) -> Iterator[list[str | None]]:
    if quota:
        for window in read_windows(shard, columns, "id"):
            yield window.texts[:quota]
            quota -= window.num_rows
            if quota <= 0:
                return


def parity(ours: Path, theirs: Path) -> dict[str, Any]:
    """Compare two output files row by row, joined by ``id``.

    Returns:
        ``rows`` that both have, largest |difference| of any number, smallest cosine of any row.
    """
    (our_ids, our_vectors), (their_ids, their_vectors) = _vectors(ours), _vectors(theirs)
    _, ours_at, theirs_at = np.intersect1d(our_ids, their_ids, assume_unique=True, return_indices=True)
    difference, cosine = 0.0, 1.0
    for start in range(0, len(ours_at), ROWS_AT_ONCE):
        a = our_vectors[ours_at[start : start + ROWS_AT_ONCE]].astype(np.float64)
        b = their_vectors[theirs_at[start : start + ROWS_AT_ONCE]].astype(np.float64)
        difference = max(difference, float(np.abs(a - b).max()))
        product = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = min(cosine, float(((a * b).sum(axis=1) / product.clip(min=1e-30)).min()))
    return {"rows": len(ours_at), "max_abs_difference": difference, "min_cosine": cosine}


def _vectors(file: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    table = pq.read_table(file, columns=["id", "embedding"], partitioning=None)
    column = table["embedding"].combine_chunks()
    return table["id"].to_numpy(), column.flatten().to_numpy().reshape(len(column), -1)
