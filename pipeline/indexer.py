"""Committed vectors -> one FAISS index, the file that names its rows, and ``index.json``, which is replaced last.

Three passes over the embeddings, each streaming: check every vector and draw the sample; add every vector and find
the exact neighbours of the queries; write the ids. The index that was there stays valid until ``index.json`` names the
new files, so a crash at any moment leaves the old one, and nothing is published whose measured recall is below the
limit.

A vector's FAISS id is ``shard ordinal << 32 | row of the output file``. A shard keeps its ordinal from one build to the
next and no other shard ever gets it, so a shard's vectors are one range of ids whatever is added beside it.

It does not embed, import torch, or lock the output: whoever starts it makes sure that one build runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import ledger
from pipeline.errors import ConfigError, EmbedCorpusError, IndexingError, OutputError, one_line
from pipeline.storage import Output, sha256_file
from pipeline.threads import available_cores

VERSION = 1
FLAT = "IDMap2,Flat"
FLAT_LIMIT = 50_000
"""``auto`` searches exactly up to here: 50,000 x 384 float32 are 77 MB and a few milliseconds a query."""

NUM_QUERIES = 200
NEIGHBOURS = 10
EXACT_DEPTH = 64
"""Exact neighbours kept a query. More than the ten that are judged, so that ties need no second look at the vectors."""

MIN_TRAIN_PER_LIST = 39
TRAIN_PER_LIST = 50
MIN_TRAIN = 65_536
"""FAISS's k-means wants 39 vectors a list; 50 leave a margin. Codes without lists (PQ, SQ8) train on at least these."""

BLOCK_FLOATS = 4 << 20
NORM_TOLERANCE = 1e-3
SCORE_TOLERANCE = 1e-6
MAX_EF_SEARCH = 1024
IDS_ROW_GROUP = 8192
SEED = 20_240_229

Say = Callable[[str], None]
Vectors = NDArray[np.float32]
Positions = NDArray[np.int64]


def build_index(
    output: str, factory: str = "auto", *, min_recall: float = 0.95, progress: Say | None = None
) -> dict[str, Any]:
    """Build the index of an output folder, or keep the one that already covers its committed shards.

    Recall is recall@10 against exact search over all committed vectors. Its queries are a seeded sample of the corpus'
    own vectors, kept out of training, and a query never counts itself. They are documents: queries of another kind
    (short questions) can do better or worse.

    Args:
        output: the folder given as ``--output``.
        factory: ``auto``, or a FAISS factory string; one that cannot be trained on so few vectors becomes exact search
            and says so in ``warnings``.
        min_recall: the limit below which nothing is published, 0 to 1.
        progress: gets one line of text now and then.

    Returns:
        the content of ``index.json`` and ``reused``: whether the index was there already.

    Raises:
        ConfigError: nothing is committed, the factory is wrong, the folder cannot be written, or its shards were made
            with different configurations.
        IndexingError: vectors are missing, damaged or not finite, or the recall stays below the limit.
    """
    say: Say = progress or (lambda line: None)
    if not 0.0 <= min_recall <= 1.0:
        raise ConfigError(f"--min-recall {min_recall}: expected a number from 0 to 1")
    store = Output(output)
    previous = _previous(store)
    corpus = _open_corpus(store, previous)
    if _covers(previous, corpus, factory, min_recall):
        return {**previous, "reused": True}
    faiss = load_faiss()
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(available_cores())
    try:
        return {**_build(faiss, corpus, factory, min_recall, previous, say), "reused": False}
    except MemoryError as error:
        raise IndexingError(
            f"{store.root}: not enough memory to index {corpus.num_vectors:,} vectors of {corpus.dim} dimensions as "
            f"{factory}; choose a smaller one, for example --index IVF1024,SQ8"
        ) from error
    finally:
        faiss.omp_set_num_threads(threads)


def load_faiss() -> Any:
    """The faiss module, imported only where it is needed: it must not be in the process that embeds.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError('faiss is not installed; run: pip install "embed-corpus[cpu]"') from error


def _build(
    faiss: Any, corpus: _Corpus, factory: str, min_recall: float, previous: dict[str, Any], say: Say
) -> dict[str, Any]:
    clock = _Clock()
    key = _key_field(corpus)
    plan = _plan(faiss, factory, corpus)
    queries_at, train_at = _draw(corpus.num_vectors, plan.num_train)
    if corpus.num_lost:
        plan.warn(
            f"{corpus.num_lost} commit records left out: the files they name are gone; run `embed-corpus run` again"
        )
    say(f"index: {corpus.num_vectors:,} vectors of {corpus.dim} dimensions in {len(corpus.files):,} shards")
    with clock("scan"):
        norms = _Norms()
        sample = _pick(norms.watch(_told(corpus, "checked", say)), np.concatenate([queries_at, train_at]), corpus.dim)
        queries, train = sample[: len(queries_at)], sample[len(queries_at) :]
    if not norms.normalized:
        plan.warn("vectors are not of unit length: ranked by inner product, which favours long vectors")
    with clock("train"):
        index = _trained(faiss, plan, train, corpus.dim)
    del sample, train
    with clock("add"):
        truth = _fill(faiss, index, corpus, queries, queries_at, say)
    with clock("tune"):
        trial = _Trial(faiss, index, corpus, queries, truth)
        setting = _tune(trial, plan, min_recall)
    for warning in plan.warnings:
        say(f"index: warning: {warning}")
    built = _Built(index, plan, trial, setting, norms.normalized, key)
    del index  # so that publishing can let go of it before it reads the written one
    return _publish(faiss, built, corpus, factory, previous, clock)


# -- the committed vectors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """One committed embeddings file.

    Attributes:
        start: how many vectors the files before it hold.
        num_input_rows: rows of the shard; None where the commit does not say.
        quarantine: what the commit says of the rows without a vector: path, rows, sha256; None when all have one.
    """

    key: str
    ordinal: int
    path: str
    rows: int
    sha256: str
    start: int
    num_input_rows: int | None
    quarantine: dict[str, Any] | None

    def record(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "ordinal": self.ordinal,
            "path": self.path,
            "rows": self.rows,
            "sha256": self.sha256,
            # Tells a file whose vectors are unchanged but belong to other input rows.
            "quarantine": self.quarantine["sha256"] if self.quarantine else None,
        }


class _Block(NamedTuple):
    """Consecutive vectors of one file: ``row`` counts in the file, ``position`` over all files."""

    file: _File
    row: int
    vectors: Vectors

    @property
    def position(self) -> int:
        return self.file.start + self.row

    @property
    def faiss_ids(self) -> Positions:
        return (self.file.ordinal << 32) + np.arange(self.row, self.row + len(self.vectors), dtype=np.int64)


@dataclass(frozen=True)
class _Corpus:
    """All committed files, in the natural order of their keys.

    Attributes:
        num_lost: commit records that do not count, because what they name is not there.
    """

    store: Output
    run: dict[str, Any]
    dim: int
    files: list[_File]
    num_lost: int

    @cached_property
    def num_vectors(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def fingerprint(self) -> str:
        return str(self.run["fingerprint"])

    @cached_property
    def _starts(self) -> Positions:
        return np.array([file.start for file in self.files], dtype=np.int64)

    @cached_property
    def _ordinals(self) -> Positions:
        return np.array([file.ordinal for file in self.files], dtype=np.int64)

    def faiss_ids(self, positions: Positions) -> Positions:
        at = np.searchsorted(self._starts, positions, side="right") - 1
        return np.asarray((self._ordinals[at] << 32) | (positions - self._starts[at]), dtype=np.int64)

    def positions(self, faiss_ids: Positions) -> Positions:
        by_ordinal = np.argsort(self._ordinals)
        at = by_ordinal[np.searchsorted(self._ordinals, faiss_ids >> 32, sorter=by_ordinal)]
        return np.asarray(self._starts[at] + (faiss_ids & 0xFFFFFFFF), dtype=np.int64)

    def blocks(self, wanted: Positions | None = None) -> Iterator[_Block]:
        """Every vector in order, or only the row groups that hold one of the ascending positions ``wanted``."""
        for file in self.files:
            if wanted is None or _touches(wanted, file.start, file.rows):
                with _reading(self.store, file):
                    yield from self._file_blocks(file, wanted)

    def _file_blocks(self, file: _File, wanted: Positions | None) -> Iterator[_Block]:
        with _open_embeddings(self.store, file, self.dim) as parquet:
            row, batch_rows = 0, max(1, BLOCK_FLOATS // self.dim)
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if wanted is None or _touches(wanted, file.start + row, rows):
                    at = row
                    for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=["embedding"]):
                        yield _Block(file, at, _vectors(batch.column("embedding"), self.dim))
                        at += batch.num_rows
                row += rows


def _open_corpus(store: Output, previous: dict[str, Any]) -> _Corpus:
    run, records = ledger.read_run(store), ledger.Ledger(store)
    commits = records.commits()
    if not commits:
        raise ConfigError(f"nothing committed in {store.root}; run `embed-corpus run` with this --output first")
    _check_one_configuration(store, run, commits)
    ordinals = _ordinals(previous, [commit["shard"]["key"] for commit in commits])
    files, start = [], 0
    for commit in commits:
        shard, written = commit["shard"], commit["output"]
        file = _File(
            key=shard["key"],
            ordinal=ordinals[shard["key"]],
            path=written["path"],
            rows=written["rows"],
            sha256=written["sha256"],
            start=start,
            num_input_rows=shard.get("num_rows"),
            quarantine=commit.get("quarantine"),
        )
        files.append(file)
        start += file.rows
    if not start:
        raise IndexingError(
            f"{store.root}: the {len(files)} committed shards hold no vector, so there is nothing to index; "
            f"see {store.root}/quarantine for why each row got none"
        )
    return _Corpus(store, run, int(commits[0]["output"]["dim"]), files, len(records.keys()) - len(commits))


def _check_one_configuration(store: Output, run: dict[str, Any], commits: list[dict[str, Any]]) -> None:
    """One index, one embedding space: vectors of two models have the same shape and nothing in common."""
    for commit in commits:
        for what, found, expected in (
            ("fingerprint", commit["fingerprint"], run["fingerprint"]),
            ("dimensions", commit["output"]["dim"], commits[0]["output"]["dim"]),
        ):
            if found != expected:
                raise ConfigError(
                    f"{store.root}: shard {commit['shard']['key']} was embedded with {what} {found}, expected "
                    f"{expected}; run `embed-corpus run` again so that all shards have one configuration"
                )


def _ordinals(previous: dict[str, Any], keys: list[str]) -> dict[str, int]:
    known = {shard["key"]: shard["ordinal"] for shard in previous.get("shards", [])}
    unused = iter(range(previous.get("next_ordinal", 0), 2**31))
    return {key: known[key] if key in known else next(unused) for key in keys}


_REDO = "remove the shard's commit and run `embed-corpus run` again"


@contextlib.contextmanager
def _reading(store: Output, file: _File) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, pa.ArrowException) as error:
        raise IndexingError(f"{store.path(file.path)}: cannot be read ({one_line(error)}); {_REDO}") from error


def _open_embeddings(store: Output, file: _File, dim: int) -> pq.ParquetFile:
    """An embeddings file whose shape is as committed; a damaged page raises when it is read."""
    parquet = pq.ParquetFile(store.path(file.path), page_checksum_verification=True, pre_buffer=False)
    found, kind = parquet.metadata.num_rows, parquet.schema_arrow.field("embedding").type
    if found == file.rows and pa.types.is_fixed_size_list(kind) and kind.list_size == dim:
        return parquet
    parquet.close()
    raise IndexingError(
        f"{store.path(file.path)}: found {found} rows of {kind}, expected {file.rows} rows of {dim} dimensions as "
        f"committed; {_REDO}"
    )


def _key_field(corpus: _Corpus) -> pa.Field:
    """Name and type of the ids, the first column of every file, once all files are as committed.

    A key that changes its type from file to file is another key.
    """
    fields = {}
    for file in corpus.files:
        with _reading(corpus.store, file), _open_embeddings(corpus.store, file, corpus.dim) as parquet:
            found = parquet.schema_arrow.field(0)
        kind = found.type.value_type if pa.types.is_dictionary(found.type) else found.type
        fields[file.path] = pa.field(found.name, kind)
        first_path, first = next(iter(fields.items()))
        if not fields[file.path].equals(first):
            raise IndexingError(
                f"{corpus.store.path(file.path)}: the id column is {found.name!r} ({kind}), but {first.name!r} "
                f"({first.type}) in {first_path}; give all shards one name and type"
            )
    return first


def _vectors(column: Any, dim: int) -> Vectors:
    # Arrow's flatten drops null rows, which would shift every later vector to another id.
    if column.null_count:
        raise pa.ArrowInvalid("null embedding")
    flat = column.flatten()
    return np.ascontiguousarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(-1, dim)


def _touches(ascending: Positions, start: int, rows: int) -> bool:
    first, last = np.searchsorted(ascending, [start, start + rows])
    return bool(last > first)


def _told(corpus: _Corpus, verb: str, say: Say, every_s: float = 5.0) -> Iterator[_Block]:
    last = time.monotonic()
    for block in corpus.blocks():
        yield block
        if time.monotonic() - last > every_s:
            last = time.monotonic()
            say(f"index: {verb} {block.position + len(block.vectors):,} of {corpus.num_vectors:,} vectors")


# -- checking and sampling -------------------------------------------------------------------------------------------


@dataclass
class _Norms:
    """Whether all vectors are of unit length. A vector that is not finite ends the build."""

    normalized: bool = True

    def watch(self, blocks: Iterable[_Block]) -> Iterator[_Block]:
        for block in blocks:
            # float64, so that a long finite vector does not look infinite
            norms = np.sqrt(np.einsum("ij,ij->i", block.vectors, block.vectors, dtype=np.float64))
            if not np.isfinite(norms).all():
                # FAISS would count such a row and never return it, or return it first (SQ8)
                row = block.row + int(np.flatnonzero(~np.isfinite(norms))[0])
                raise IndexingError(f"{block.file.path}: vector at output row {row} is not finite; {_REDO}")
            self.normalized &= bool((np.abs(norms - 1.0) <= NORM_TOLERANCE).all())
            yield block


def _draw(num_vectors: int, num_train: int) -> tuple[Positions, Positions]:
    """Positions of the queries and of the training vectors, over all shards; apart wherever there are enough."""
    rng = np.random.default_rng(SEED)
    num_queries = min(NUM_QUERIES, num_vectors)
    drawn = rng.choice(num_vectors, min(num_vectors, num_queries + num_train), replace=False).astype(np.int64)
    apart = len(drawn) == num_queries + num_train
    return drawn[:num_queries], drawn[num_queries:] if apart else drawn[:num_train]


def _pick(blocks: Iterable[_Block], positions: Positions, dim: int) -> Vectors:
    """The vectors at ``positions``, in their order, (len(positions), dim) float32."""
    order = np.argsort(positions, kind="stable")
    ascending = positions[order]
    picked = np.empty((len(positions), dim), dtype=np.float32)
    for block in blocks:
        low, high = np.searchsorted(ascending, [block.position, block.position + len(block.vectors)])
        picked[order[low:high]] = block.vectors[ascending[low:high] - block.position]
    return picked


# -- the kind of index -----------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    factory: str
    num_train: int
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def _plan(faiss: Any, requested: str, corpus: _Corpus) -> _Plan:
    plan = _auto(corpus.num_vectors) if requested == "auto" else _explicit(requested, corpus.num_vectors)
    if plan.factory != FLAT:
        _made(faiss, plan.factory, corpus.dim)  # a wrong factory is told before a long read, not after it
    return plan


def _auto(num_vectors: int) -> _Plan:
    if num_vectors <= FLAT_LIMIT:
        return _Plan(FLAT, 0)
    lists = 2 ** round(math.log2(4 * math.sqrt(num_vectors)))
    for_training = num_vectors - NUM_QUERIES
    while lists > 1 and min(for_training, TRAIN_PER_LIST * lists) < MIN_TRAIN_PER_LIST * lists:
        lists //= 2
    return _Plan(f"IVF{lists},Flat", min(for_training, TRAIN_PER_LIST * lists))


def _explicit(requested: str, num_vectors: int) -> _Plan:
    factory = requested.strip()
    if re.search(r"(^|,)(RFlat|Refine)", factory):
        raise ConfigError(f"--index {requested}: a refining index cannot keep row ids; leave the refinement out")
    inverted = re.search(r"(?:^|,)(?:IVF|IMI)(\d+)", factory)
    bare = re.sub(r"^IDMap2?,", "", factory)
    lists = int(inverted[1]) if inverted else 0
    plan = _Plan(bare if inverted else f"IDMap2,{bare}", min(num_vectors, max(TRAIN_PER_LIST * lists, MIN_TRAIN)))
    if inverted and bare != factory:
        plan.warn(f"{requested}: IDMap left out, an inverted file keeps ids itself and loses them when wrapped")
    if inverted and plan.num_train < MIN_TRAIN_PER_LIST * lists:
        plan.warn(f"{bare}: {plan.num_train} training vectors for {lists} lists, {MIN_TRAIN_PER_LIST} a list wanted")
    return plan


def _made(faiss: Any, factory: str, dim: int) -> Any:
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"--index {factory}: FAISS cannot make it for {dim} dimensions ({_faiss_reason(error)}); expected auto or "
            "a factory string such as IVF1024,SQ8"
        ) from error


def _faiss_reason(error: RuntimeError) -> str:
    """FAISS puts a C++ signature and a source line before what it has to say."""
    return re.sub(r"^Error in .*? at \S+:\d+: ", "", one_line(error))


def _trained(faiss: Any, plan: _Plan, sample: Vectors, dim: int) -> Any:
    index = _made(faiss, plan.factory, dim)
    if index.is_trained:
        return index
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        # FAISS prints about too few vectors on stderr; the plan has said so already.
        ivf.cp.min_points_per_centroid = 1
    try:
        index.train(sample)
    except RuntimeError as error:
        plan.warn(f"{plan.factory} cannot be trained on {len(sample)} vectors ({_faiss_reason(error)}): exact search")
        plan.factory = FLAT
        return _made(faiss, FLAT, dim)
    return index


# -- adding, and the truth to measure against ------------------------------------------------------------------------


@dataclass
class _Truth:
    """The exact neighbours of each query, best first, itself left out.

    Attributes:
        own: (n,) FAISS id of each query; an id that no vector has where the corpus is one single vector.
        ids, scores: (n, depth).
        judged: how many neighbours recall is about: 10, fewer in a tiny corpus.
    """

    own: Positions
    ids: Positions
    scores: Vectors
    judged: int

    @property
    def limits(self) -> Vectors:
        """(n,) the score from which on a neighbour counts: that of the last judged one, so that ties are no misses."""
        last = self.scores[:, self.judged - 1]
        return np.asarray(last - SCORE_TOLERANCE * np.maximum(1.0, np.abs(last)), dtype=np.float32)


def _fill(faiss: Any, index: Any, corpus: _Corpus, queries: Vectors, queries_at: Positions, say: Say) -> _Truth:
    """Add every vector and find the queries' exact neighbours on the way: one read of the vectors serves both."""
    depth = min(EXACT_DEPTH, corpus.num_vectors)
    ids = np.full((len(queries), depth), -1, dtype=np.int64)
    scores = np.full((len(queries), depth), -np.inf, dtype=np.float32)
    for block in _told(corpus, "added", say):
        index.add_with_ids(block.vectors, block.faiss_ids)
        near, at = faiss.knn(queries, block.vectors, min(depth, len(block.vectors)), metric=faiss.METRIC_INNER_PRODUCT)
        ids, scores = _best(np.hstack([ids, block.faiss_ids[at]]), np.hstack([scores, near]), depth)
    if index.ntotal != corpus.num_vectors:
        raise IndexingError(f"{corpus.store.root}: the index holds {index.ntotal} vectors of {corpus.num_vectors}")
    if corpus.num_vectors == 1:
        return _Truth(np.array([-2], dtype=np.int64), ids, scores, 1)
    own = corpus.faiss_ids(queries_at)
    order = _self_last(ids, own)
    ids, scores = np.take_along_axis(ids, order, 1)[:, :-1], np.take_along_axis(scores, order, 1)[:, :-1]
    return _Truth(own, ids, scores, min(NEIGHBOURS, corpus.num_vectors - 1))


def _best(ids: Positions, scores: Vectors, depth: int) -> tuple[Positions, Vectors]:
    order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)


def _self_last(ids: Positions, own: Positions) -> NDArray[np.intp]:
    """The order that moves a query's own id to the end; where it is not among them, the last one is the surplus."""
    return np.argsort(ids == own[:, None], axis=1, kind="stable")


# -- measuring -------------------------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    """A search parameter, its value, and the recall on the queries that did not choose it."""

    name: str | None
    value: int | None
    recall: float
    num_queries: int


class _Trial:
    """Searches the finished index and says how much of the truth it finds."""

    def __init__(self, faiss: Any, index: Any, corpus: _Corpus, queries: Vectors, truth: _Truth) -> None:
        self.faiss, self.index, self.corpus, self.queries, self.truth = faiss, index, corpus, queries, truth

    def set(self, name: str, value: int) -> None:
        self.faiss.ParameterSpace().set_index_parameter(self.index, name, value)

    def recalls(self) -> NDArray[np.float64]:
        """(n,) the share of its judged neighbours each query finds."""
        judged, truth = self.truth.judged, self.truth
        _, ids = self.index.search(self.queries, judged + 1)
        ids = np.take_along_axis(ids, _self_last(ids, truth.own), 1)[:, :judged]
        known = truth.scores[:, :, None] >= truth.limits[:, None, None]
        hits = ((truth.ids[:, :, None] == ids[:, None, :]) & known).any(axis=1)
        self._count_far_ties(hits, ids)
        return np.asarray(hits.mean(axis=1, dtype=np.float64))

    def _count_far_ties(self, hits: NDArray[np.bool_], ids: Positions) -> None:
        """Where a query has more equals than the truth keeps (many duplicates), score what was found instead."""
        overflow = self.truth.scores[:, -1] >= self.truth.limits
        complete = self.truth.ids.shape[1] >= self.corpus.num_vectors - 1
        query, place = np.nonzero(~hits & (ids >= 0) & overflow[:, None]) if not complete else ((), ())
        if len(query):
            wanted, at = np.unique(self.corpus.positions(ids[query, place]), return_inverse=True)
            vectors = _pick(self.corpus.blocks(wanted), wanted, self.corpus.dim)
            scores = np.einsum("ij,ij->i", vectors[at], self.queries[query])
            hits[query, place] = scores >= self.truth.limits[query]

    def knob(self) -> tuple[str, list[int]] | None:
        """The parameter that trades time for recall and its values, cheapest first; None for a fixed index."""
        ivf = self.faiss.try_extract_index_ivf(self.index)
        if ivf is not None:
            return "nprobe", _ladder(1, ivf.nlist)
        try:
            self.set("efSearch", 16)
        except RuntimeError:
            return None
        return "efSearch", _ladder(16, MAX_EF_SEARCH)


def _ladder(low: int, high: int) -> list[int]:
    """Powers of two and the values midway: 1 2 3 4 6 8 12 … high."""
    powers = [2**power for power in range(high.bit_length())]
    return sorted({value for p in powers for value in (p, p + p // 2) if low <= value < high} | {high})


def _tune(trial: _Trial, plan: _Plan, min_recall: float) -> _Setting:
    """The cheapest setting that reaches the limit on one half of the queries and keeps it on the other."""
    knob = trial.knob()
    if knob is None:
        recalls = trial.recalls()
        best = _Setting(None, None, float(recalls.mean()), len(recalls))
        if best.recall >= min_recall:
            return best
    else:
        name, values = knob
        best = _Setting(name, values[0], -1.0, 0)
        for value in values:
            trial.set(name, value)
            recalls = trial.recalls()
            choosing, held_out = (recalls[::2], recalls[1::2]) if len(recalls) > 1 else (recalls, recalls)
            setting = _Setting(name, value, float(held_out.mean()), len(held_out))
            if min(choosing.mean(), held_out.mean()) >= min_recall:
                return setting
            best = max(best, setting, key=lambda one: one.recall)
    at = f" at {best.name}={best.value}" if best.name else ""
    raise IndexingError(
        f"{plan.factory} reached recall@{trial.truth.judged} {best.recall:.3f}{at}, below --min-recall {min_recall:g}; "
        "not published; choose an index that keeps more of each vector, such as IVF1024,Flat, or lower the limit"
    )


def _interval(recall: float, num_queries: int) -> tuple[float, float]:
    """95 % Wilson interval, counting queries rather than neighbours: those of one query stand or fall together."""
    z = 1.96
    spread = z * math.sqrt(recall * (1 - recall) / num_queries + z * z / (4 * num_queries * num_queries))
    middle, scale = recall + z * z / (2 * num_queries), 1 + z * z / num_queries
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def _latency_ms(faiss: Any, index: Any, queries: Vectors) -> dict[str, float]:
    """One query after the other on one thread, after a first one that is not counted."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        index.search(queries[:1], NEIGHBOURS)
        taken = [_search_seconds(index, queries[at : at + 1]) for at in range(len(queries))]
    finally:
        faiss.omp_set_num_threads(threads)
    return {f"p{p}": round(float(np.percentile(taken, p)) * 1e3, 4) for p in (50, 99)}


def _search_seconds(index: Any, query: Vectors) -> float:
    started = time.perf_counter()
    index.search(query, NEIGHBOURS)
    return time.perf_counter() - started


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - started, 3)


# -- publishing ------------------------------------------------------------------------------------------------------


@dataclass
class _Built:
    index: Any
    plan: _Plan
    trial: _Trial
    setting: _Setting
    normalized: bool
    key: pa.Field


def _publish(
    faiss: Any, built: _Built, corpus: _Corpus, requested: str, previous: dict[str, Any], clock: _Clock
) -> dict[str, Any]:
    store = corpus.store
    temporaries = []
    try:
        with _writing(store), clock("publish"):
            temporaries = [store.temporary("index/index.faiss"), store.temporary("index/ids.parquet")]
            faiss.write_index(built.index, str(temporaries[0]))
            _write_ids(corpus, built.key, str(temporaries[1]))
            sums = {"index": sha256_file(temporaries[0]), "ids": sha256_file(temporaries[1])}
            latency = _reopened(faiss, built, str(temporaries[0]))
            sizes = {"index": temporaries[0].stat().st_size, "ids": temporaries[1].stat().st_size}
            # Named by content: a new build never overwrites a file that the old index.json names, unless it equals it.
            generation = hashlib.sha256("".join(sums.values()).encode()).hexdigest()[:12]
            names = {"index_file": f"index/index-{generation}.faiss", "ids_file": f"index/ids-{generation}.parquet"}
            for temporary, name in zip(temporaries, names.values(), strict=True):
                store.publish(temporary, name)
        document = _document(built, corpus, requested, previous, clock)
        document |= {**names, "sha256": sums, "bytes": sizes, "latency_ms": latency}
        document["bytes_per_vector"] = round(sizes["index"] / corpus.num_vectors, 2)
        with _writing(store):
            store.write_json("index/index.json", document)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
    _remove_others(store, set(names.values()))
    return document


def _document(
    built: _Built, corpus: _Corpus, requested: str, previous: dict[str, Any], clock: _Clock
) -> dict[str, Any]:
    setting = built.setting
    low, high = _interval(setting.recall, setting.num_queries)
    return {
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": corpus.fingerprint,
        "requested": requested,
        "factory": built.plan.factory,
        "metric": "inner_product",
        "normalized": built.normalized,
        "ntotal": corpus.num_vectors,
        "dim": corpus.dim,
        "nprobe": setting.value if setting.name == "nprobe" else None,
        "ef_search": setting.value if setting.name == "efSearch" else None,
        "recall_at_10": {
            "value": round(setting.recall, 6),
            "low": round(low, 6),
            "high": round(high, 6),
            "queries": setting.num_queries,
            "k": built.trial.truth.judged,
        },
        "id_column": built.key.name,
        "shards": [file.record() for file in corpus.files],
        "next_ordinal": max(previous.get("next_ordinal", 0), *(file.ordinal + 1 for file in corpus.files)),
        "warnings": built.plan.warnings,
        "seconds": clock.seconds,
    }


def _reopened(faiss: Any, built: _Built, path: str) -> dict[str, float]:
    """Read the written file back, search it, and compare: what is published is what was measured. Returns latency."""
    trial, setting = built.trial, built.setting
    expected = trial.index.search(trial.queries[:8], trial.truth.judged)[1]
    built.index = trial.index = None  # one index in memory, not two
    try:
        index = faiss.read_index(path)
    except RuntimeError as error:
        raise IndexingError(f"{path}: the written index cannot be read back ({_faiss_reason(error)})") from error
    if setting.name is not None:
        faiss.ParameterSpace().set_index_parameter(index, setting.name, setting.value)
    found = index.search(trial.queries[:8], trial.truth.judged)[1]
    if index.ntotal != trial.corpus.num_vectors or not np.array_equal(found, expected):
        raise IndexingError(f"{path}: the written index answers differently from the one in memory; not published")
    return _latency_ms(faiss, index, trial.queries)


def _write_ids(corpus: _Corpus, key: pa.Field, path: str) -> None:
    """faiss_id, id, shard, row of every vector, in the order of the shards: line p is position p."""
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
            for table in _id_tables(schema, key.name, corpus, file):
                writer.write_table(table, row_group_size=IDS_ROW_GROUP)


def _id_tables(schema: pa.Schema, id_column: str, corpus: _Corpus, file: _File) -> Iterator[pa.Table]:
    with _reading(corpus.store, file), _open_embeddings(corpus.store, file, corpus.dim) as parquet:
        yield from _file_id_tables(schema, id_column, corpus, file, parquet)


def _file_id_tables(
    schema: pa.Schema, id_column: str, corpus: _Corpus, file: _File, parquet: pq.ParquetFile
) -> Iterator[pa.Table]:
    rows, at = _input_rows(corpus, file, parquet), 0
    for batch in parquet.iter_batches(8 * IDS_ROW_GROUP, columns=[id_column]):
        n = batch.num_rows
        shard = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, dtype=np.int32)), pa.array([file.key]))
        ids = batch.column(id_column).cast(schema.field("id").type)
        faiss_ids = (file.ordinal << 32) + np.arange(at, at + n, dtype=np.int64)
        columns = [pa.array(faiss_ids), ids, shard, pa.array(rows[at : at + n])]
        yield pa.Table.from_arrays(columns, schema=schema)
        at += n


def _input_rows(corpus: _Corpus, file: _File, parquet: pq.ParquetFile) -> Positions:
    """(rows,) int64, the input row of each vector: all rows but the quarantined ones, in order."""
    carried = corpus.run.get("config", {}).get("columns") or []
    if {"chunk", "row"} <= set(parquet.schema_arrow.names) and "row" not in carried:
        # A text cut into chunks has several vectors, so the file says itself where each one is from.
        return np.asarray(parquet.read(columns=["row"]).column("row").to_numpy(), dtype=np.int64)
    missing = _quarantined_rows(corpus.store, file)
    total = file.rows + len(missing)
    if file.num_input_rows not in (None, total) or (len(missing) and missing[-1] >= total):
        raise IndexingError(
            f"{file.key}: {file.rows} vectors and {len(missing)} quarantined rows do not make the "
            f"{file.num_input_rows} rows of the shard; {_REDO}"
        )
    return np.delete(np.arange(total, dtype=np.int64), missing)


def _quarantined_rows(store: Output, file: _File) -> Positions:
    if file.quarantine is None:
        return np.empty(0, dtype=np.int64)
    path = store.path(file.quarantine["path"])
    try:
        # Opened as one file: as a dataset, a folder named key=value in its path would become a column.
        with pq.ParquetFile(path) as parquet:
            rows = parquet.read(columns=["row"]).column("row").to_numpy()
    except (OSError, KeyError, pa.ArrowException) as error:
        raise IndexingError(f"{path}: cannot be read ({one_line(error)}); {_REDO}") from error
    return np.unique(rows).astype(np.int64)


@contextlib.contextmanager
def _writing(store: Output) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(f"{store.path('index')}: cannot be written ({one_line(error)})") from error
        raise _output_error(store, one_line(error)) from error
    except RuntimeError as error:  # FAISS' own writer
        raise _output_error(store, _faiss_reason(error)) from error


def _output_error(store: Output, reason: str) -> OutputError:
    return OutputError(
        f"{store.path('index')}: the index cannot be written ({reason}); the old one, if any, is untouched. Make room, "
        "then run `embed-corpus index` again"
    )


def _remove_others(store: Output, keep: set[str]) -> None:
    """Older generations and what a crash left. Failing to remove them harms nobody: nothing names them."""
    with contextlib.suppress(OSError):
        for path in store.path("index").iterdir():
            ours = re.fullmatch(r"(index-\w+\.faiss|ids-\w+\.parquet|\.(index|ids)\..*\.tmp)", path.name)
            if ours and f"index/{path.name}" not in keep:
                path.unlink(missing_ok=True)


def _previous(store: Output) -> dict[str, Any]:
    """The index.json that is there; empty when there is none, or none of this version."""
    document = store.read_json("index/index.json")
    return document if isinstance(document, dict) and document.get("version") == VERSION else {}


def _covers(previous: dict[str, Any], corpus: _Corpus, requested: str, min_recall: float) -> bool:
    """Whether the index that is there is the one that would be built."""
    if not previous or previous["recall_at_10"]["value"] < min_recall:
        return False
    same = ("key", "sha256", "quarantine")
    return (
        previous["fingerprint"] == corpus.fingerprint
        and previous["requested"] == requested
        and [[shard[name] for name in same] for shard in previous["shards"]]
        == [[file.record()[name] for name in same] for file in corpus.files]
        and all(corpus.store.size(previous[f"{what}_file"]) == size for what, size in previous["bytes"].items())
    )


# -- its own process -------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """``python -m pipeline.indexer OUTPUT``: progress on stderr, index.json's content on stdout, our exit codes."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.indexer", description=main.__doc__)
    parser.add_argument("output")
    parser.add_argument("--factory", default="auto")
    parser.add_argument("--min-recall", type=float, default=0.95)
    options = parser.parse_args(arguments)
    # Read by OpenMP when FAISS is loaded, so before it.
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    try:
        document = build_index(
            options.output,
            options.factory,
            min_recall=options.min_recall,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except EmbedCorpusError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
