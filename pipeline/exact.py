"""Vectors as they stand in the embeddings files -> exact scores of candidates, and the exact nearest of some rows.

An index may keep codes instead of vectors (SQ8, PQ, RaBitQ), or be unable to search some rows only; here nothing is
approximate. Only row groups that hold a wanted row are read, each once however many queries want it, and several files
at the same time: one row group a thread is in memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.rows import Positions, group_starts

FLOATS_AT_ONCE = 4 << 20  # 16 MiB beside the row group itself
ROW_BITS = 32

Vectors = NDArray[np.float32]
OpenShard = Callable[[dict[str, Any]], contextlib.AbstractContextManager[pq.ParquetFile]]
Visitor = Callable[[int, Vectors], None]


class StoredVectors:
    """The vectors of an index' rows, by FAISS id: ``shard ordinal << 32 | row of the output file``.

    Args:
        document: the content of ``index.json``.
        open_shard: opens the embeddings file of one of its shards.
        num_threads: files read at the same time.
    """

    def __init__(self, document: dict[str, Any], open_shard: OpenShard, num_threads: int) -> None:
        self._shards = {int(shard["ordinal"]): shard for shard in document["shards"]}
        self._open, self._dim, self._num_threads = open_shard, int(document["dim"]), num_threads
        self._squared_distance = document["metric"] == "l2"

    def at(self, ids: Positions) -> Vectors:
        """(n, dim) float32, the vectors of (n,) FAISS ids."""
        wanted, place = np.unique(ids, return_inverse=True)
        vectors = np.empty((len(wanted), self._dim), dtype=np.float32)

        def keep(start: int, found: Vectors) -> None:
            vectors[start : start + len(found)] = found

        self._visit(wanted, keep)
        return vectors[place]

    def rerank(self, queries: Vectors, ids: Positions) -> tuple[Vectors, Positions]:
        """The (n, m) candidates of (n, dim) queries with exact scores, best first; equals keep their order."""
        nearness = self._nearness(queries, ids)
        order = np.argsort(-nearness, axis=1, kind="stable")
        return self._scores(np.take_along_axis(nearness, order, 1)), np.take_along_axis(ids, order, 1)

    def _scores(self, nearness: Vectors) -> Vectors:
        return -nearness if self._squared_distance else nearness

    def _nearness(self, queries: Vectors, ids: Positions) -> Vectors:
        """(n, m) float32, inner products or negative squared distances; -inf where the id is -1."""
        wanted, at = np.unique(ids, return_inverse=True)
        nothing = int(np.searchsorted(wanted, 0))  # 1 where -1 is among them
        # Pairs of query and candidate, sorted by candidate, so that those of a row group are neighbours.
        order = np.argsort(at.ravel(), kind="stable")
        borders = np.searchsorted(at.ravel()[order], np.arange(len(wanted) + 1))
        nearness = np.full(ids.size, -np.inf, dtype=np.float32)
        step = max(1, FLOATS_AT_ONCE // self._dim)

        def compare(start: int, vectors: Vectors) -> None:
            first = start + nothing
            pairs = order[borders[first] : borders[first + len(vectors)]]
            for piece in (pairs[at_once : at_once + step] for at_once in range(0, len(pairs), step)):
                candidates, asked = vectors[at.ravel()[piece] - first], queries[piece // ids.shape[1]]
                if self._squared_distance:
                    nearness[piece] = -np.square(candidates - asked).sum(axis=1)
                else:
                    nearness[piece] = np.einsum("ij,ij->i", candidates, asked)

        self._visit(wanted[nothing:], compare)
        return nearness.reshape(ids.shape)

    def nearest(self, queries: Vectors, k: int, ids: Positions) -> tuple[Vectors, Positions]:
        """(n, k) scores and FAISS ids of the nearest among (m,) ascending ``ids``, m >= k; ties by id."""
        best = np.full((len(queries), k), -np.inf, dtype=np.float32)
        found = np.full((len(queries), k), np.iinfo(np.int64).max, dtype=np.int64)
        turn, step = threading.Lock(), max(1, FLOATS_AT_ONCE // max(len(queries), self._dim))

        def compare(start: int, vectors: Vectors) -> None:
            for row in range(0, len(vectors), step):
                piece = vectors[row : row + step]
                here = np.broadcast_to(ids[start + row : start + row + len(piece)], (len(queries), len(piece)))
                nearness = queries @ piece.T
                if self._squared_distance:
                    one, other = queries.astype(np.float64), piece.astype(np.float64)  # differences of large numbers
                    lengths = np.square(one).sum(axis=1)[:, None] + np.square(other).sum(axis=1)
                    nearness = (2 * (one @ other.T) - lengths).astype(np.float32)
                with turn:
                    nearness, candidates = np.hstack([best, nearness]), np.hstack([found, here])
                    order = np.lexsort((candidates, -nearness), axis=1)[:, :k]
                    best[:] = np.take_along_axis(nearness, order, 1)
                    found[:] = np.take_along_axis(candidates, order, 1)

        self._visit(ids, compare)
        return self._scores(best), found

    def _visit(self, ids: Positions, visitor: Visitor) -> None:
        """Show a visitor the vectors of ascending, different ids: where in ``ids`` they begin, and (m, dim) of them.

        It is called from several threads, each time for other ids.
        """
        ordinals, firsts = np.unique(ids >> ROW_BITS, return_index=True)
        lasts = [*firsts[1:], len(ids)]

        def visit_shard(ordinal: int, first: int, last: int) -> None:
            rows = ids[first:last] & (1 << ROW_BITS) - 1
            with self._open(self._shards[ordinal]) as parquet:
                starts = group_starts(parquet)
                borders = np.searchsorted(rows, starts)
                for group in np.flatnonzero(np.diff(borders)):
                    low, high = borders[group], borders[group + 1]
                    column = parquet.read_row_group(int(group), columns=["embedding"]).column("embedding")
                    taken = column.take(rows[low:high] - starts[group]).combine_chunks()
                    flat = np.asarray(taken.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
                    visitor(first + int(low), flat.reshape(-1, self._dim))

        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(visit_shard, ordinals.tolist(), firsts.tolist(), lasts))
