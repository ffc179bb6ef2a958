"""Committed vectors -> one FAISS index, the file that names its rows, and ``index.json``, which is replaced last.

Three passes over the embeddings, each streaming: check every vector and draw the sample; add every vector and find
the exact neighbours of the queries; write the ids. The index that was there stays valid until ``index.json`` names the
new files, so a crash at any moment leaves the old one, and nothing is published whose measured recall is below the
limit.

It does not embed, import torch, or lock the output: whoever starts it makes sure that one build runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import recall
from pipeline.corpus import Block, Corpus, Positions, Vectors, open_corpus, scan, write_ids
from pipeline.errors import ConfigError, EmbedCorpusError, IndexingError, OutputError, one_line
from pipeline.storage import Storage, open_output, sha256_file
from pipeline.threads import available_cores

VERSION = 1
FLAT = "IDMap2,Flat"
FLAT_LIMIT = 50_000
"""``auto`` searches exactly up to here: 50,000 x 384 float32 are 77 MB and a few milliseconds a query."""

MIN_TRAIN_PER_LIST = 39
TRAIN_PER_LIST = 50
MIN_TRAIN = 65_536
"""FAISS's k-means wants 39 vectors a list; 50 leave a margin. Codes without lists (PQ, SQ8) train on at least these."""

Say = Callable[[str], None]


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
        OutputError: the disk is full.
    """
    if not 0.0 <= min_recall <= 1.0:
        raise ConfigError(f"--min-recall {min_recall}: expected a number from 0 to 1")
    store = open_output(output)
    previous = store.read_json("index/index.json")
    if not isinstance(previous, dict) or previous.get("version") != VERSION:
        previous = {}  # none, cut, or of another version
    corpus = open_corpus(store, previous)
    if previous and _covers(previous, corpus, factory, min_recall):
        return {**previous, "reused": True}
    try:
        with recall.faiss_threads(available_cores()):
            built = _build(corpus, factory, min_recall, progress or (lambda line: None))
            return {**_publish(built, previous), "reused": False}
    except MemoryError as error:
        raise IndexingError(
            f"{store.root}: not enough memory to index {corpus.num_vectors:,} vectors of {corpus.dim} dimensions as "
            f"{factory}; choose a smaller one, for example --index IVF1024,SQ8"
        ) from error


def _covers(previous: dict[str, Any], corpus: Corpus, requested: str, min_recall: float) -> bool:
    """Whether the index that is there is the one that would be built."""
    return (
        previous["recall_at_10"]["value"] >= min_recall
        and previous["fingerprint"] == corpus.fingerprint
        and previous["requested"] == requested
        and previous["shards"] == [file.record() for file in corpus.files]
        and all(
            corpus.store.size(f"index/{previous[f'{what}_file']}") == size for what, size in previous["bytes"].items()
        )
    )


@dataclass
class _Built:
    """A measured index that is not on the disk yet, and all that ``index.json`` says of it."""

    corpus: Corpus
    key: pa.Field
    requested: str
    plan: _Plan
    index: Any
    truth: recall.Truth
    setting: recall.Setting
    normalized: bool
    seconds: dict[str, float]


def _build(corpus: Corpus, factory: str, min_recall: float, say: Say) -> _Built:
    seconds: dict[str, float] = {}
    key = corpus.id_field()
    plan = plan_index(factory, corpus.num_vectors)
    _made(plan.factory, corpus.dim)  # a wrong factory is told before a long read, not after it
    warn = plan.warnings.append
    if corpus.num_lost:
        warn(f"{corpus.num_lost} commit records left out: the files they name are gone; run `embed-corpus run` again")
    say(f"index: {corpus.num_vectors:,} vectors of {corpus.dim} dimensions in {len(corpus.files):,} shards")
    queries_at, train_at = recall.draw(corpus.num_vectors, plan.num_train)
    with _timed(seconds, "scan"):
        sample, normalized = scan(_told(corpus, "checked", say), np.concatenate([queries_at, train_at]), corpus.dim)
    # A copy: a view would keep the whole sample in memory.
    queries, train = sample[: len(queries_at)].copy(), sample[len(queries_at) :]
    if not normalized:
        warn("vectors are not of unit length: ranked by inner product, which favours long vectors")
    with _timed(seconds, "train"):
        index = _trained(plan, train)
    del sample, train
    with _timed(seconds, "add"):
        truth = _fill(index, corpus, queries, queries_at, say)
    with _timed(seconds, "tune"):
        setting = recall.tune(index, truth, plan.factory, min_recall)
    for warning in plan.warnings:
        say(f"index: warning: {warning}")
    return _Built(corpus, key, factory, plan, index, truth, setting, normalized, seconds)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 3)


@dataclass
class _Plan:
    factory: str
    num_train: int
    warnings: list[str] = field(default_factory=list)


def plan_index(requested: str, num_vectors: int) -> _Plan:
    """The factory, and how many vectors it trains on; faiss is not needed for that.

    Raises:
        ConfigError: the factory cannot keep row ids.
    """
    return _auto(num_vectors) if requested == "auto" else _explicit(requested, num_vectors)


def _auto(num_vectors: int) -> _Plan:
    if num_vectors <= FLAT_LIMIT:
        return _Plan(FLAT, 0)
    for_training = num_vectors - recall.NUM_QUERIES
    wanted, trainable = 4 * math.sqrt(num_vectors), for_training / MIN_TRAIN_PER_LIST
    lists = 2 ** min(round(math.log2(wanted)), math.floor(math.log2(trainable)))
    return _Plan(f"IVF{lists},Flat", min(for_training, TRAIN_PER_LIST * lists))


def _explicit(requested: str, num_vectors: int) -> _Plan:
    factory = requested.strip()
    if re.search(r"(^|,)(RFlat|Refine)", factory):
        raise ConfigError(f"--index {requested}: a refining index cannot keep row ids; leave the refinement out")
    inverted = re.search(r"(?:^|,)(?:IVF|IMI)(\d+)", factory)
    bare = re.sub(r"^IDMap2?,", "", factory)
    lists = int(inverted[1]) if inverted else 0
    plan = _Plan(bare if inverted else f"IDMap2,{bare}", min(num_vectors, max(TRAIN_PER_LIST * lists, MIN_TRAIN)))
    warn = plan.warnings.append
    if inverted and bare != factory:
        warn(f"{requested}: IDMap left out, an inverted file keeps ids itself and loses them when wrapped")
    if plan.num_train < MIN_TRAIN_PER_LIST * lists:
        warn(f"{bare}: {plan.num_train} training vectors for {lists} lists, {MIN_TRAIN_PER_LIST} a list wanted")
    return plan


def _made(factory: str, dim: int) -> Any:
    faiss = recall.load_faiss()
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"--index {factory}: FAISS cannot make it for {dim} dimensions ({recall.faiss_reason(error)}); expected "
            "auto or a factory string such as IVF1024,SQ8"
        ) from error


def _trained(plan: _Plan, sample: Vectors) -> Any:
    """An empty index; exact search, with a warning, where ``sample``, (n, dim) float32, is too small to train on."""
    dim = sample.shape[1]
    index = _made(plan.factory, dim)
    if index.is_trained:
        return index
    ivf = recall.load_faiss().try_extract_index_ivf(index)
    if ivf is not None:
        # FAISS prints about too few vectors on stderr; the plan has said so already.
        ivf.cp.min_points_per_centroid = 1
    try:
        index.train(sample)
    except RuntimeError as error:
        reason = recall.faiss_reason(error)
        plan.warnings.append(f"{plan.factory} cannot be trained on {len(sample)} vectors ({reason}): exact search")
        plan.factory = FLAT
        return _made(FLAT, dim)
    return index


def _fill(index: Any, corpus: Corpus, queries: Vectors, queries_at: Positions, say: Say) -> recall.Truth:
    """Add every vector and find the queries' exact neighbours on the way: one read of the vectors serves both."""
    truth = recall.Truth(corpus, queries, queries_at)
    for block in _told(corpus, "added", say):
        index.add_with_ids(block.vectors, block.faiss_ids)
        truth.add(block)
    if index.ntotal != corpus.num_vectors:
        raise IndexingError(f"{corpus.store.root}: the index holds {index.ntotal} vectors of {corpus.num_vectors}")
    return truth


def _told(corpus: Corpus, verb: str, say: Say) -> Iterator[Block]:
    last = time.monotonic()
    for block in corpus.blocks():
        yield block
        if time.monotonic() - last > 5.0:
            last = time.monotonic()
            say(f"index: {verb} {block.position + len(block.vectors):,} of {corpus.num_vectors:,} vectors")


def _publish(built: _Built, previous: dict[str, Any]) -> dict[str, Any]:
    corpus, store = built.corpus, built.corpus.store
    with _writing(store) as files:
        with _timed(built.seconds, "publish"):
            recall.load_faiss().write_index(built.index, str(files["index"]))
            write_ids(corpus, built.key, files["ids"])
            sums = {what: sha256_file(path) for what, path in files.items()}
            latency = _reopened(built, files["index"])
            sizes = {what: path.stat().st_size for what, path in files.items()}
            # Named by content: a new build never overwrites a file that the old index.json names, unless it equals it.
            generation = hashlib.sha256("".join(sums.values()).encode()).hexdigest()[:12]
            names = {"index": f"index-{generation}.faiss", "ids": f"ids-{generation}.parquet"}
            for what, name in names.items():
                store.publish(files[what], f"index/{name}")
        document = _document(built, previous) | {f"{what}_file": name for what, name in names.items()}
        per_vector = round(sizes["index"] / corpus.num_vectors, 2)
        document |= {"sha256": sums, "bytes": sizes, "latency_ms": latency, "bytes_per_vector": per_vector}
        store.write_json("index/index.json", document)
    _remove_others(store, set(names.values()))
    return document


@contextlib.contextmanager
def _writing(store: Storage) -> Iterator[dict[str, Path]]:
    """Temporary names for the two files; whatever is left under them in the end is removed."""
    files: dict[str, Path] = {}
    try:
        files = {"index": store.temporary("index/index.faiss"), "ids": store.temporary("index/ids.parquet")}
        yield files
    except (OSError, RuntimeError) as error:  # RuntimeError: FAISS' own writer
        place = store.location("index")
        if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(f"{place}: cannot be written ({one_line(error)})") from error
        raise OutputError(
            f"{place}: the index cannot be written ({recall.faiss_reason(error)}); the old one, if any, is untouched. "
            "Make room, then run `embed-corpus index` again"
        ) from error
    finally:
        for path in files.values():
            with contextlib.suppress(OSError):  # a folder that cannot be written: the error above says so
                path.unlink(missing_ok=True)


def _reopened(built: _Built, path: Path) -> dict[str, float]:
    """Read the written file back, search it, and compare: what is published is what was measured. Returns latency."""
    queries, k = built.truth.queries, built.truth.judged
    expected = built.index.search(queries[:8], k)[1]
    built.index = None  # one index in memory, not two
    try:
        index = recall.load_faiss().read_index(str(path))
    except RuntimeError as error:
        raise IndexingError(f"{path}: the written index cannot be read back ({recall.faiss_reason(error)})") from error
    recall.set_parameter(index, built.setting.name, built.setting.value)
    found = index.search(queries[:8], k)[1]
    if index.ntotal != built.corpus.num_vectors or not np.array_equal(found, expected):
        raise IndexingError(f"{path}: the written index answers differently from the one in memory; not published")
    return recall.latency_ms(index, queries)


def _document(built: _Built, previous: dict[str, Any]) -> dict[str, Any]:
    corpus, setting = built.corpus, built.setting
    return {
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": corpus.fingerprint,
        "requested": built.requested,
        "factory": built.plan.factory,
        "metric": "inner_product",
        "normalized": built.normalized,
        "ntotal": corpus.num_vectors,
        "dim": corpus.dim,
        "nprobe": setting.value if setting.name == "nprobe" else None,
        "ef_search": setting.value if setting.name == "efSearch" else None,
        "recall_at_10": setting.record(),
        "id_column": built.key.name,
        "chunked": any(file.chunked for file in corpus.files),
        "shards": [file.record() for file in corpus.files],
        "next_ordinal": max(previous.get("next_ordinal", 0), *(file.ordinal + 1 for file in corpus.files)),
        "warnings": built.plan.warnings,
        "seconds": built.seconds,
    }


def _remove_others(store: Storage, keep: set[str]) -> None:
    """Older generations and what a crash left. Failing to remove them harms nobody: nothing names them."""
    with contextlib.suppress(OSError, EmbedCorpusError):
        for name in list(store.files("index", "", hidden=True)):
            base = name.removeprefix("index/")
            ours = re.fullmatch(r"(index-\w+\.faiss|ids-\w+\.parquet|\.(index|ids)\..*\.tmp)", base)
            if ours and base not in keep:
                store.remove(name)


def main(arguments: list[str] | None = None) -> int:
    """``python -m pipeline.indexer OUTPUT``: progress on stderr, index.json's content on stdout, our exit codes."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.indexer", description=main.__doc__)
    parser.add_argument("output")
    parser.add_argument("--factory", default="auto")
    parser.add_argument("--min-recall", type=float, default=0.95)
    parser.add_argument("--check-dim", type=int, help="build nothing, only see whether FAISS can make the factory")
    options = parser.parse_args(arguments)
    say = functools.partial(print, file=sys.stderr, flush=True)
    # Read by OpenMP when FAISS is loaded, so before it.
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    try:
        if options.check_dim:
            _made(_explicit(options.factory, 1).factory, options.check_dim)
            print("{}")
            return 0
        document = build_index(options.output, options.factory, min_recall=options.min_recall, progress=say)
    except EmbedCorpusError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
