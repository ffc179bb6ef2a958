"""A filled index and the exact neighbours of its queries -> the cheapest setting that finds enough of them.

Recall is over vectors of the corpus itself, kept out of training; a query never counts itself, and equals of the last
neighbour that counts are no misses. Nothing is published here, and no vector is read but those of far ties.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.corpus import Block, Corpus, Positions, Vectors
from pipeline.errors import IndexingError
from pipeline.faiss_library import INNER_PRODUCT, nearest
from pipeline.faiss_library import faiss_reason as faiss_reason
from pipeline.faiss_library import faiss_threads as faiss_threads
from pipeline.faiss_library import load_faiss as load_faiss
from pipeline.faiss_library import num_gpus as num_gpus
from pipeline.faiss_library import set_parameter as set_parameter

NUM_QUERIES = 200
NEIGHBOURS = 10
JUDGED = (1, 10, 100)
DEPTH = 127
"""Exact neighbours kept a query. More than the hundred that are judged: some may be removed, and ties of the last one
need no second look at the vectors."""

CURVE = 3
"""Settings beyond the chosen one that are measured too: what more time would give."""
QUICK_QUERIES = 50  # of a setting that is only tried
SCORE_TOLERANCE = 1e-6
MAX_EF_SEARCH = 1024
SEED = 20_240_229


def draw(num_vectors: int, num_train: int) -> tuple[Positions, Positions]:
    """Positions of the queries and of the training vectors, ascending; apart wherever there are enough vectors.

    All positions are cut into as many equal stretches as are wanted, and one is drawn from each: whatever the shards
    are sorted by, all of it is in the sample.
    """
    rng = np.random.default_rng(SEED)
    num_queries = min(NUM_QUERIES, num_vectors)
    apart = num_queries + num_train <= num_vectors
    num_drawn = num_queries + num_train if apart else min(num_train, num_vectors)
    drawn = _one_a_stretch(rng, num_vectors, num_drawn)
    if not apart:
        return _one_a_stretch(rng, num_vectors, num_queries), drawn
    is_query = np.zeros(len(drawn), dtype=bool)
    is_query[_one_a_stretch(rng, len(drawn), num_queries)] = True
    return drawn[is_query], drawn[~is_query]


def _one_a_stretch(rng: np.random.Generator, num: int, num_stretches: int) -> Positions:
    borders = np.arange(num_stretches + 1, dtype=np.int64) * num // max(1, num_stretches)
    return borders[:-1] + rng.integers(0, np.diff(borders))


class Truth:
    """The exact neighbours of each query, best first, itself left out; complete once every block was added.

    It outlives the build: of a corpus that changed a little, what went is dropped and what came is added, without a
    look at all other vectors. Neighbours that were never kept are then missing below the removed ones, so each query
    has a score down to which its neighbours are known, and nothing is added below it.

    Attributes:
        ids: (n,) int64, the queries' own FAISS ids.
        queries: (n, dim) float32.
        neighbours, scores: (n, DEPTH) int64 FAISS ids and float32 scores, larger is nearer; -1 and -inf where there are
            no more.
        known_to: (n,) float32, the score down to which the neighbours are known; -inf for all of them.
    """

    def __init__(self, ids: Positions, queries: Vectors, metric: str = INNER_PRODUCT) -> None:
        shape = (len(ids), DEPTH)
        self.ids, self.queries, self.metric = ids, queries, metric
        self.neighbours = np.full(shape, -1, dtype=np.int64)
        self.scores = np.full(shape, -np.inf, dtype=np.float32)
        self.known_to = np.full(len(ids), -np.inf, dtype=np.float32)

    def add(self, block: Block, *, alone: bool = False) -> None:
        """See whether a block has nearer neighbours; the only vector of a corpus, ``alone``, is its own."""
        if self.metric == INNER_PRODUCT and not num_gpus():
            products = self.queries @ block.vectors.T
            # Of most blocks only a few are nearer than what is kept: to look for those is three times as fast as to
            # find the nearest of the block (measured on 1 million vectors of 384, 200 queries, 2 cores).
            query, row = np.divmod(np.flatnonzero(products > self.scores[:, -1:]), len(block.vectors))
            counts = np.bincount(query, minlength=len(self.ids))
            if counts.max(initial=0) <= DEPTH:
                scores = np.full((len(self.ids), counts.max(initial=0)), -np.inf, dtype=np.float32)
                ids = np.full(scores.shape, -1, dtype=np.int64)
                place = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
                scores[query, place], ids[query, place] = products[query, row], block.faiss_ids[row]
                self._take(ids, scores, alone=alone)
                return
        # One more, because a query may be among them.
        k = min(DEPTH + 1, len(block.vectors))
        scores, rows = nearest(self.queries, block.vectors, k, self.metric)
        self._take(block.faiss_ids[rows], scores, alone=alone)

    def _take(self, ids: Positions, scores: Vectors, *, alone: bool) -> None:
        """Keep of (n, m) candidates what is nearer than what is kept."""
        scores[scores < self.known_to[:, None]] = -np.inf
        if not alone:
            scores[ids == self.ids[:, None]] = -np.inf
        self._keep_best(np.hstack([self.neighbours, ids]), np.hstack([self.scores, scores]))

    def _keep_best(self, neighbours: Positions, scores: Vectors) -> None:
        best = np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]
        self.scores = np.take_along_axis(scores, best, 1)
        self.neighbours = np.where(self.scores == -np.inf, -1, np.take_along_axis(neighbours, best, 1))

    def drop(self, ordinals: Sequence[int]) -> None:
        """Forget the vectors of some shards, as neighbours and as queries."""
        self.known_to = self._known_to()
        gone = (self.neighbours >= 0) & np.isin(self.neighbours >> 32, ordinals)
        self._keep_best(self.neighbours, np.where(gone, np.float32(-np.inf), self.scores))
        self._choose(~np.isin(self.ids >> 32, ordinals))

    def drop_unknown(self, num_vectors: int) -> None:
        """Forget the queries of which too many neighbours went to judge any recall, among so many vectors."""
        found = (self.scores > -np.inf).sum(axis=1)
        self._choose(found >= min(max(JUDGED), num_vectors - 1))

    def _choose(self, which: NDArray[np.bool_]) -> None:
        for name in ("ids", "queries", "neighbours", "scores", "known_to"):
            setattr(self, name, getattr(self, name)[which])

    def _known_to(self) -> Vectors:
        # A list that is not full holds all there are.
        return np.maximum(self.known_to, np.where(self.neighbours[:, -1] >= 0, self.scores[:, -1], -np.inf))

    def recalls(self, index: Any, corpus: Corpus, k: int) -> NDArray[np.float64]:
        """(n,) the share of its k nearest that the index finds for each query; of fewer in a tiny corpus."""
        k = judged(k, corpus.num_vectors)
        last = self.scores[:, k - 1]
        # From here on a neighbour counts: equals of the last one are no misses.
        limits = np.asarray(last - SCORE_TOLERANCE * np.maximum(1.0, np.abs(last)), dtype=np.float32)
        found = index.search(self.queries, k + 1)[1]
        # Itself to the end; where it is not among them, the last one is the surplus.
        own = (found == self.ids[:, None]) & (corpus.num_vectors > 1)
        found = np.take_along_axis(found, np.argsort(own, axis=1, kind="stable")[:, :k], 1)
        counts = (self.scores >= limits[:, None]) & (self.neighbours >= 0)
        hits = ((self.neighbours[:, :, None] == found[:, None, :]) & counts[:, :, None]).any(axis=1)
        # Where a query has more equals than are kept (many duplicates), what was found is scored instead.
        overflow = self._known_to() >= limits
        query, place = np.nonzero(~hits & (found >= 0) & overflow[:, None])
        if len(query):
            wanted, at = np.unique(found[query, place], return_inverse=True)
            vectors = corpus.vectors_at(corpus.positions(wanted))
            hits[query, place] = self._score(vectors[at], self.queries[query]) >= limits[query]
        return np.asarray(hits.mean(axis=1, dtype=np.float64))

    def _score(self, vectors: Vectors, queries: Vectors) -> Vectors:
        """(n,) of each pair; larger is nearer."""
        if self.metric == INNER_PRODUCT:
            return np.asarray(np.einsum("ij,ij->i", vectors, queries))
        return np.asarray(-np.einsum("ij,ij->i", vectors - queries, vectors - queries))

    def save(self, path: Path) -> None:
        """As Parquet: a line a query."""
        columns = {
            "faiss_id": pa.array(self.ids),
            "vector": _lists(self.queries),
            "neighbours": _lists(self.neighbours),
            "scores": _lists(self.scores),
            "known_to": pa.array(self.known_to),
        }
        table = pa.table(columns).replace_schema_metadata({"metric": self.metric})
        pq.write_table(table, path, compression="zstd", write_page_checksum=True)

    @classmethod
    def load(cls, path: Path) -> Truth:
        """What ``save`` wrote.

        Raises:
            OSError, pa.ArrowException: it cannot be read.
        """
        table = pq.read_table(path, page_checksum_verification=True, memory_map=False).combine_chunks()
        rows, columns = table.num_rows, {name: table.column(name) for name in table.column_names}

        def matrix(name: str) -> NDArray[Any]:
            flat = columns[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return np.array(flat).reshape(rows, -1)

        truth = cls(columns["faiss_id"].to_numpy(), matrix("vector"), table.schema.metadata[b"metric"].decode())
        truth.neighbours, truth.scores = matrix("neighbours"), matrix("scores")
        truth.known_to = columns["known_to"].to_numpy()
        return truth


def _lists(rows: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def judged(k: int, num_vectors: int) -> int:
    """How many neighbours recall@k is about: fewer than k in a tiny corpus."""
    return min(k, max(1, num_vectors - 1))


@dataclass(frozen=True)
class Setting:
    """A search parameter, its value, and what it gave: recall on the queries that choose and on those that do not."""

    name: str | None
    value: int | None
    chosen_by: float
    recall: float
    p50_ms: float

    def record(self) -> dict[str, Any]:
        return {"value": self.value, "recall_at_10": round(self.recall, 6), "p50_ms": self.p50_ms}

    def __str__(self) -> str:
        at = f" at {self.name}={self.value}" if self.name else ""
        return f"{self.recall:.3f}{at}"


@dataclass(frozen=True)
class Measured:
    """An index at its setting: what ``index.json`` says of it."""

    setting: Setting
    tried: list[Setting]
    recalls: dict[int, dict[str, Any]]
    latency_ms: dict[str, float]


class Missed(IndexingError):
    """An index that does not reach a limit at any setting.

    Args:
        found: what it reaches.
        advice: to a user.
    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}; not published; {advice}")
        self.found = found


def tune(
    index: Any,
    truth: Truth,
    corpus: Corpus,
    factory: str,
    min_recall: float,
    max_latency_ms: float | None = None,
) -> Measured:
    """The cheapest setting that reaches the limit on one half of the queries and keeps it on the other; it stays set.

    Raises:
        Missed: none does, or not fast enough; names ``factory`` and the best that can be reached.
    """
    tried: list[Setting] = []
    name, values = _knob(index)
    chosen, more = None, CURVE
    for value in values:
        tried.append(_tried(index, truth, corpus, name, value))
        if chosen is None and min(tried[-1].chosen_by, tried[-1].recall) >= min_recall:
            chosen = tried[-1]
        elif chosen is not None and (more := more - 1) == 0:
            break
    k = judged(10, corpus.num_vectors)
    if chosen is None:
        most = max(tried, key=lambda setting: setting.recall)
        raise Missed(
            f"{factory} reached recall@{k} {most}, below --min-recall {min_recall:g}",
            "choose an index that keeps more of each vector, such as IVF1024,Flat, or lower the limit",
        )
    set_parameter(index, name, chosen.value)
    latency = latency_ms(index, truth.queries)
    if max_latency_ms is not None and latency["p50"] > max_latency_ms:
        fast = [setting for setting in tried if setting.p50_ms <= max_latency_ms]
        best = max(fast, key=lambda setting: setting.recall, default=None)
        within = f"the best within it is {best}" if best else "no setting is within it"
        raise Missed(
            f"{factory} reached recall@{k} {chosen} in {latency['p50']:g} ms a query, above --max-latency-ms "
            f"{max_latency_ms:g}; {within}",
            "allow more time or a lower --min-recall",
        )
    half = slice(1, None, 2) if _halved(name, truth) else slice(None)
    recalls = {}
    for at in JUDGED:
        values_at = truth.recalls(index, corpus, at)[half]
        recalls[at] = _record(float(values_at.mean()), len(values_at), judged(at, corpus.num_vectors))
    return Measured(chosen, tried, recalls, latency)


def _tried(index: Any, truth: Truth, corpus: Corpus, name: str | None, value: int | None) -> Setting:
    set_parameter(index, name, value)
    recalls = truth.recalls(index, corpus, 10)
    choosing, held_out = (recalls[::2], recalls[1::2]) if _halved(name, truth) else (recalls, recalls)
    p50 = latency_ms(index, truth.queries[:QUICK_QUERIES])["p50"]
    return Setting(name, value, float(choosing.mean()), float(held_out.mean()), p50)


def _halved(name: str | None, truth: Truth) -> bool:
    return name is not None and len(truth.ids) > 1


def _record(recall: float, num_queries: int, k: int) -> dict[str, Any]:
    low, high = interval(recall, num_queries)
    rounded = {"value": round(recall, 6), "low": round(low, 6), "high": round(high, 6)}
    return {**rounded, "queries": num_queries, "k": k}


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
        for at in (0, *range(len(queries))):  # the first one twice
            started = time.perf_counter()
            index.search(queries[at : at + 1], NEIGHBOURS)
            taken.append(time.perf_counter() - started)
    return {f"p{p}": round(float(np.percentile(taken[1:], p)) * 1e3, 4) for p in (50, 99)}
