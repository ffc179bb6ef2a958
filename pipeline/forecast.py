"""A sample and the measured seconds of some of its batches into what a run of any size would take.

Token counts come with the band that the scatter of the sample leaves. Seconds follow from the cost of a batch
(`cost_model.py`), its windows and batches planned by the rule of the run, and its shards dealt out to the devices in
the run's order. Memory, disk and the index are computed from counts; what is an allowance says so.

Nothing is read, written or measured here.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batcher import plan_batches
from pipeline.calibration import cost_terms, windows
from pipeline.cost_model import fit_cost, student
from pipeline.index_choice import IndexOptions, choices, predict
from pipeline.reader import WINDOW_BYTES, WINDOW_ROWS
from pipeline.records import Shard
from pipeline.sample import Sample
from pipeline.threads import available_cores

OTHER_LOAD = 0.15  # share of the time that no sample can tell: other load on the machine, its clock and its heat
WRITE_BYTES_PER_S = 200e6
COMPRESSED_SHARE = 0.85  # of float32 vectors in Parquet; measured on all-MiniLM-L6-v2, December 2026
SHARD_S = 0.05  # to open, flush and rename the files of a shard
INDEX_START_S = 1.0  # a process that loads faiss
INDEX_FLOPS_PER_CORE = 20e9
INDEX_KMEANS_ROUNDS = 10
HASH_BYTES = 16  # of a row in reuse/
INDEX_ROW_BYTES = 12  # of a row in the table of ids, beside the id
WORKER_GROWTH = 1.25  # its allocator goes on growing: 0.80 GB while timing, 1.00 after 43 batches (all-MiniLM-L6-v2)
COORDINATOR_BYTES = 200_000_000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % band."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, half: float) -> Estimate:
        return cls(round(value, 3), round(max(0.0, value - half), 3), round(value + half, 3))

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class IndexPlan:
    """The index that a run would build.

    Attributes:
        factory: as ``index.json`` will say.
        size_bytes: of the index file; None for a factory whose size is not known here.
        num_train: vectors it trains on.
        warnings: the indexer's.
        build_bytes: of memory that building it takes; None where that is not known.
    """

    factory: str
    size_bytes: int | None
    num_train: int
    warnings: list[str] = field(default_factory=list)
    build_bytes: int | None = None


def full_window_rows(shards: Sequence[Shard], sample: Sample) -> int:
    """Rows of a full window of the run."""
    longest = max(shard.num_rows or 0 for shard in shards)
    return min(WINDOW_ROWS, longest, max(1, math.ceil(WINDOW_BYTES / (sample.text_bytes + 16))))


@dataclass
class Measured:
    """What the worker found, and what follows from it for any number of rows.

    Attributes:
        pieces: (num_sampled_rows,) vectors of each row.
        weights: (num_sampled_rows,) sum 1: what share of all rows each stands for.
        lengths: (num_pieces,) tokens of each.
        dropped: (num_pieces,) tokens cut off each.
        spots: sampled rows of each spot, in order; empty where every row was read.
        coefficients: (3,) seconds of each of ``cost_terms``.
        scatter: 95 % band of the mean seconds of a batch, as a share.
        tokenize_s: a row.
    """

    pieces: NDArray[np.int64]
    weights: NDArray[np.float64]
    lengths: NDArray[np.int32]
    dropped: NDArray[np.int64]
    spots: list[int]
    padded: bool
    budget: int
    window_rows: int
    text_bytes: float
    coefficients: NDArray[np.float64]
    scatter: float
    num_timed: int
    tokenize_s: float
    peak_memory_bytes: int
    _known: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: dict[str, Any], sample: Sample, budget: int, window_rows: int) -> Measured:
        coefficients, scatter = fit_cost(np.array(answer["timed"], np.float64).reshape(-1, 4))
        spots = np.array([len(sample.texts)] if sample.every_row else sample.spots)
        return cls(
            weights=np.repeat(1 / (len(spots) * spots), spots),
            pieces=np.array(answer["pieces"], np.int64),
            lengths=np.array(answer["lengths"], np.int32),
            dropped=np.array(answer["dropped"], np.int64),
            spots=[] if sample.every_row else sample.spots,
            padded=bool(answer["padded"]),
            budget=budget,
            window_rows=window_rows,
            text_bytes=sample.text_bytes,
            coefficients=coefficients,
            scatter=scatter,
            num_timed=len(answer["timed"]),
            tokenize_s=float(answer["tokenize_s"]) / len(sample.texts),
            peak_memory_bytes=int(answer["peak_memory_bytes"]),
        )

    def tokens_a_row(self) -> tuple[float, float]:
        """Mean, and the half width of its 95 % band: from the scatter of the spots, 0 where every row was read."""
        owner = np.repeat(np.arange(len(self.pieces)), self.pieces)
        per_row = np.bincount(owner, weights=self.lengths, minlength=len(self.pieces))
        mean = float(self.weights @ per_row)
        if len(self.spots) < 2:
            return mean, mean if self.spots else 0.0
        means = np.add.reduceat(per_row, np.cumsum([0, *self.spots[:-1]])) / np.array(self.spots)
        return mean, half_width(means)

    def truncated_share(self) -> float:
        """Of all vectors, those whose text is cut."""
        weights = np.repeat(self.weights, self.pieces)
        return float(weights @ (self.dropped > 0) / weights.sum()) if len(weights) else 0.0

    def shard(self, num_rows: int) -> tuple[float, float]:
        """Batches of a shard of so many rows, and the seconds they take."""
        full, rest = divmod(num_rows, self.window_rows)
        terms = full * self._window(self.window_rows) + self._window(rest)
        # Windows are laid out from the sample as it is; where spots differ in size its rows stand for more or fewer.
        plain = float(self.lengths.sum()) / len(self.pieces)
        weight = self.tokens_a_row()[0] / plain if plain else 1.0
        return float(terms[2]) * weight, float(terms @ self.coefficients) * weight

    def _window(self, num_rows: int) -> NDArray[np.float64]:
        """(3,) ``cost_terms`` of all batches of a window; large ones are rounded, so that few differ."""
        if not num_rows:
            return np.zeros(3)
        rounded = num_rows if num_rows <= 256 else min(self.window_rows, math.ceil(num_rows / 256) * 256)
        if rounded not in self._known:
            laid_out = windows(self.pieces, rounded)
            terms = [
                cost_terms(self.lengths[window[batch]], padded=self.padded)
                for window in laid_out
                for batch in plan_batches(self.lengths[window], self.budget, padded=self.padded)
            ]
            self._known[rounded] = np.array(terms, np.float64).reshape(-1, 3).sum(axis=0) / len(laid_out)
        terms_of_window = self._known[rounded] * (num_rows / rounded)
        terms_of_window[2] = math.ceil(terms_of_window[2])
        return terms_of_window


def half_width(means: NDArray[np.float64]) -> float:
    """Of the 95 % band of the mean of spots in row order.

    Each spot stands in a part of the rows of its own, so only what differs between neighbours is chance; how the parts
    differ is not. (The successive difference estimator; it errs on the safe side.)
    """
    variance = float((np.diff(means) ** 2).mean()) / 2
    return student(len(means)) * math.sqrt(variance / len(means))


def embedding(
    measured: Measured, shards: Sequence[Shard], devices: Sequence[str], vectors: int, dim: int
) -> tuple[float, float]:
    """Batches of all shards, and the seconds until the last of their ``vectors`` is written."""
    write_s_a_row = vectors / sum(shard.num_rows or 0 for shard in shards) * dim * 4 / WRITE_BYTES_PER_S
    batches, costs = 0.0, []
    for shard in shards:
        rows = shard.num_rows or 0
        count, seconds = measured.shard(rows)
        batches += count
        tokenize_s = measured.tokenize_s * rows
        # On a CPU both want the same cores; on a GPU the tokenizer runs beside it, and only the first window waits.
        first_s = measured.tokenize_s * min(rows, measured.window_rows)
        seconds = seconds + tokenize_s if devices[0] == "cpu" else max(seconds + first_s, tokenize_s)
        costs.append(seconds + write_s_a_row * rows + SHARD_S)
    return batches, makespan(costs, len(devices))


def whole_run(measured: Measured, load_s: float, embed_s: float, index_s: float) -> Estimate:
    """Seconds of the parts together, and their band: what the sample leaves open, and what no sample can tell."""
    mean, half = measured.tokens_a_row()
    relative = math.hypot(half / mean if mean else 0.0, measured.scatter, OTHER_LOAD)
    seconds = load_s + embed_s + index_s
    band = math.hypot(embed_s * relative, 0.5 * index_s, 0.3 * load_s)
    return Estimate.around(seconds, min(band, 10 * seconds))


def makespan(seconds: Sequence[float], num_devices: int) -> float:
    """When the last shard is done: each device takes the next shard as soon as it is free."""
    free_at = [0.0] * num_devices
    for cost in seconds:
        heapq.heapreplace(free_at, free_at[0] + cost)
    return max(free_at)


def index_plan(options: IndexOptions | None, vectors: int, dim: int) -> IndexPlan | None:
    """None where none is asked for, or there is nothing to put in it.

    Raises:
        ConfigError: no index fits the memory it may take.
    """
    if options is None or not vectors:
        return None
    chosen = choices(options, vectors, dim)[0]
    predicted = predict(chosen, vectors, dim, options.max_bytes)
    return IndexPlan(
        chosen.factory, predicted.index_bytes, chosen.num_train, chosen.warnings, predicted.build_bytes
    )


def index_seconds(index: IndexPlan, vectors: int, dim: int) -> float:
    """Three reads of the vectors, one write, training and assigning, exact neighbours of 200 queries."""
    found = re.search(r"IVF(\d+)", index.factory)
    lists = int(found[1]) if found else 0
    products = 2.0 * dim * (lists * (vectors + INDEX_KMEANS_ROUNDS * index.num_train) + 200 * vectors)
    moved = 3 * 4 * dim * vectors + 2 * (index.size_bytes or 4 * dim * vectors)
    return INDEX_START_S + moved / WRITE_BYTES_PER_S + products / (INDEX_FLOPS_PER_CORE * available_cores())


def disk_bytes(
    embedding_dtype: str, carried_bytes: float, vectors: int, dim: int, index: IndexPlan | None
) -> dict[str, int | None]:
    """By what it holds, and ``total``; None where the size of the index is not known.

    Args:
        embedding_dtype: as it is stored.
        carried_bytes: of the id and carried columns, a row.
    """
    stored = 2 if embedding_dtype == "float16" else 4 * COMPRESSED_SHARE
    disk: dict[str, int | None] = {
        "embeddings": round(vectors * (dim * stored + carried_bytes)),
        "reuse": vectors * HASH_BYTES,
    }
    if index is not None:
        disk["index"] = index.size_bytes and index.size_bytes + round(vectors * INDEX_ROW_BYTES)
    return {**disk, "total": None if None in disk.values() else sum(size or 0 for size in disk.values())}


def memory_bytes(measured: Measured, num_devices: int, dim: int, index: IndexPlan | None) -> int:
    """Of all processes at once, while embedding or indexing, whichever needs more."""
    window = measured.window_rows * (2 * 4 * dim + 3 * measured.text_bytes)
    embedding = COORDINATOR_BYTES + num_devices * (WORKER_GROWTH * measured.peak_memory_bytes + window)
    indexing = 0.0 if index is None else COORDINATOR_BYTES + (index.build_bytes or 0)
    return round(max(embedding, indexing))
