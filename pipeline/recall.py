"""A filled index and the exact neighbours of its queries -> the cheapest setting that finds enough of them.

Recall is recall@10 over vectors of the corpus itself; a query never counts itself, and equals of the last neighbour
that counts are no misses. Nothing is published here, and no vector is read but those of far ties.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.corpus import Block, Corpus, Positions, Vectors
from pipeline.errors import ConfigError, IndexingError, one_line

NUM_QUERIES = 200
NEIGHBOURS = 10
EXACT_DEPTH = 63
"""Exact neighbours kept a query. More than the ten that are judged, so that ties need no second look at the vectors."""

SCORE_TOLERANCE = 1e-6
MAX_EF_SEARCH = 1024
SEED = 20_240_229


def load_faiss() -> Any:
    """The faiss module, imported only where it is needed: it must not be in the process that embeds.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError('faiss is not installed; run: pip install "embed-corpus[cpu]"') from error


def faiss_reason(error: Exception) -> str:
    """One line of what FAISS has to say; it puts a C++ signature and a source line before it."""
    return re.sub(r"^Error in .*? at \S+:\d+: ", "", one_line(error))


@contextlib.contextmanager
def faiss_threads(num_threads: int) -> Iterator[None]:
    """FAISS on so many threads; afterwards on as many as before."""
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def set_parameter(index: Any, name: str | None, value: int | None) -> None:
    """Set a search parameter by FAISS' name for it; None for an index that has none."""
    if name is not None:
        load_faiss().ParameterSpace().set_index_parameter(index, name, value)


def draw(num_vectors: int, num_train: int) -> tuple[Positions, Positions]:
    """Positions of the queries and of the training vectors, over all shards; apart wherever there are enough."""
    rng = np.random.default_rng(SEED)
    num_queries = min(NUM_QUERIES, num_vectors)
    drawn = rng.choice(num_vectors, min(num_vectors, num_queries + num_train), replace=False).astype(np.int64)
    apart = len(drawn) == num_queries + num_train
    return drawn[:num_queries], drawn[num_queries:] if apart else drawn[:num_train]


class Truth:
    """The exact neighbours of each query, best first, itself left out; complete once every block was added.

    Attributes:
        queries: (n, dim) float32.
        neighbours, scores: (n, depth) int64 positions and float32 inner products.
        judged: how many neighbours recall is about: 10, fewer in a tiny corpus.
    """

    def __init__(self, corpus: Corpus, queries: Vectors, positions: Positions) -> None:
        others = corpus.num_vectors - 1
        depth = min(EXACT_DEPTH, max(1, others))
        self.queries = queries
        self.judged = min(NEIGHBOURS, depth)
        self.neighbours = np.full((len(queries), depth), -1, dtype=np.int64)
        self.scores = np.full((len(queries), depth), -np.inf, dtype=np.float32)
        self._corpus = corpus
        # The only vector of a corpus has no neighbour but itself; no position is -2.
        self._own = (positions if others else np.array([-2]))[:, None]

    def add(self, block: Block) -> None:
        """See whether a block has nearer neighbours."""
        faiss, depth = load_faiss(), self.scores.shape[1]
        # One more, because a query may be among them.
        k = min(depth + 1, len(block.vectors))
        scores, rows = faiss.knn(self.queries, block.vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
        positions = block.position + rows
        scores[positions == self._own] = -np.inf
        positions, scores = np.hstack([self.neighbours, positions]), np.hstack([self.scores, scores])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
        self.neighbours, self.scores = np.take_along_axis(positions, best, 1), np.take_along_axis(scores, best, 1)

    @property
    def limits(self) -> Vectors:
        """(n,) the score from which on a neighbour counts: that of the last judged one, so that ties are no misses."""
        last = self.scores[:, self.judged - 1]
        return np.asarray(last - SCORE_TOLERANCE * np.maximum(1.0, np.abs(last)), dtype=np.float32)

    def recalls(self, index: Any) -> NDArray[np.float64]:
        """(n,) the share of its judged neighbours that the index finds for each query."""
        found = self._corpus.positions(index.search(self.queries, self.judged + 1)[1])
        # Itself to the end; where it is not among them, the last one is the surplus.
        order = np.argsort(found == self._own, axis=1, kind="stable")[:, : self.judged]
        found = np.take_along_axis(found, order, 1)
        counts = self.scores >= self.limits[:, None]
        hits = ((self.neighbours[:, :, None] == found[:, None, :]) & counts[:, :, None]).any(axis=1)
        self._count_far_ties(hits, found)
        return np.asarray(hits.mean(axis=1, dtype=np.float64))

    def _count_far_ties(self, hits: NDArray[np.bool_], found: Positions) -> None:
        """Where a query has more equals than are kept here (many duplicates), score what was found instead."""
        overflow = self.scores[:, -1] >= self.limits
        query, place = np.nonzero(~hits & (found >= 0) & overflow[:, None])
        if len(query):
            wanted, at = np.unique(found[query, place], return_inverse=True)
            vectors = self._corpus.vectors_at(wanted)
            hits[query, place] = np.einsum("ij,ij->i", vectors[at], self.queries[query]) >= self.limits[query]


class Setting(NamedTuple):
    """A search parameter, its value, and the recall@k on the queries that did not choose it."""

    name: str | None
    value: int | None
    recall: float
    num_queries: int
    k: int

    def record(self) -> dict[str, Any]:
        """What ``index.json`` says of the recall."""
        low, high = interval(self.recall, self.num_queries)
        rounded = {"value": round(self.recall, 6), "low": round(low, 6), "high": round(high, 6)}
        return {**rounded, "queries": self.num_queries, "k": self.k}


def tune(index: Any, truth: Truth, factory: str, min_recall: float) -> Setting:
    """The cheapest setting that reaches the limit on one half of the queries and keeps it on the other; it stays set.

    Raises:
        IndexingError: none does; names ``factory`` and the best recall.
    """
    tried = []
    name, values = _knob(index)
    for value in values:
        set_parameter(index, name, value)
        recalls = truth.recalls(index)
        choose = name is not None and len(recalls) > 1
        choosing, held_out = (recalls[::2], recalls[1::2]) if choose else (recalls, recalls)
        tried.append(Setting(name, value, float(held_out.mean()), len(held_out), truth.judged))
        if min(choosing.mean(), held_out.mean()) >= min_recall:
            return tried[-1]
    best = max(tried, key=lambda setting: setting.recall)
    at = f" at {best.name}={best.value}" if best.name else ""
    raise IndexingError(
        f"{factory} reached recall@{truth.judged} {best.recall:.3f}{at}, below --min-recall {min_recall:g}; "
        "not published; choose an index that keeps more of each vector, such as IVF1024,Flat, or lower the limit"
    )


def _knob(index: Any) -> tuple[str | None, Sequence[int | None]]:
    """The parameter that trades time for recall and its values, cheapest first; None for a fixed index."""
    ivf = load_faiss().try_extract_index_ivf(index)
    if ivf is not None:
        return "nprobe", _ladder(1, ivf.nlist)
    try:
        set_parameter(index, "efSearch", 16)
    except RuntimeError:
        return None, [None]
    return "efSearch", _ladder(16, MAX_EF_SEARCH)


def _ladder(low: int, high: int) -> list[int]:
    """Powers of two and the values midway: 1 2 3 4 6 8 12 … high."""
    powers = [2**power for power in range(high.bit_length())]
    return sorted({value for p in powers for value in (p, p + p // 2) if low <= value < high} | {high})


def interval(recall: float, num_queries: int) -> tuple[float, float]:
    """95 % Wilson interval, counting queries rather than neighbours: those of one query stand or fall together."""
    z = 1.96
    spread = z * math.sqrt(recall * (1 - recall) / num_queries + z * z / (4 * num_queries * num_queries))
    middle, scale = recall + z * z / (2 * num_queries), 1 + z * z / num_queries
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def latency_ms(index: Any, queries: Vectors) -> dict[str, float]:
    """p50 and p99 of one of the (n, dim) float32 queries after the other on one thread; a first one is not counted."""
    taken = []
    with faiss_threads(1):
        for at in (0, *range(len(queries))):
            started = time.perf_counter()
            index.search(queries[at : at + 1], NEIGHBOURS)
            taken.append(time.perf_counter() - started)
    return {f"p{p}": round(float(np.percentile(taken[1:], p)) * 1e3, 4) for p in (50, 99)}
