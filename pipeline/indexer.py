"""Committed vectors -> one FAISS index, the file that names its rows, and ``index.json``, which is replaced last.

Built anew: check every vector and draw the sample; train; add every vector, in parts that fit the memory, and find the
exact neighbours of the queries on the way; merge the parts. Updated: the same with the rows that came, merged with the
old index without the rows that went. Either way what lies on the disk in the end is opened and measured. The index
that was there stays valid until ``index.json`` names the new files, so a crash at any moment leaves the old one, and
nothing is published whose measured recall is below the limit.

It does not embed, import torch, or lock the output: whoever starts it makes sure that one build runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pipeline import index_training, recall
from pipeline.corpus import Block, Corpus, Sample, open_corpus, scan, write_ids
from pipeline.errors import EXIT_STOPPED, ConfigError, EmbedCorpusError, IndexingError, OutputError, one_line
from pipeline.faiss_library import INNER_PRODUCT, L2, faiss_reason, faiss_threads, load_faiss, num_gpus
from pipeline.index_choice import (
    Choice,
    IndexOptions,
    Predicted,
    choices,
    index_bytes,
    parse_size,
    predict,
)
from pipeline.index_document import NAME, VERSION, read_document
from pipeline.index_parts import Filling, Lists, Parts, Writing, frame, merge
from pipeline.index_update import (
    MAX_DRIFT,
    MAX_IMBALANCE,
    MIN_QUERIES,
    Changes,
    Rebuild,
    changes,
    check_updatable,
    emptied,
    kept_truth,
)
from pipeline.memory import give_back, granted_memory, short_bytes
from pipeline.prefetch import Prefetch
from pipeline.recall import Missed, Truth
from pipeline.storage import Storage, open_output, sha256_file, sha256_of
from pipeline.telemetry import peak_memory_bytes
from pipeline.threads import available_cores

PARTS = "index/parts"
LOCK = ".index.lock"
TOLD_EVERY_S = 5.0
WRITTEN_AT_ONCE = 8 << 20

Say = Callable[[str], None]
How = Literal["new", "updated", "retrained"]


def build_index(
    output: str,
    factory: str = "auto",
    *,
    min_recall: float = 0.95,
    max_index_ram: int | None = None,
    max_latency_ms: float | None = None,
    metric: Literal["ip", "l2"] | None = None,
    progress: Say | None = None,
    thorough: bool = False,
) -> dict[str, Any]:
    """Build or update the index of an output folder, or keep the one that already covers its committed shards.

    Recall is recall@10 against exact search over all committed vectors. Its queries are a seeded sample of the corpus'
    own vectors, kept out of training, and a query never counts itself. They are documents: queries of another kind
    (short questions) can do better or worse.

    Args:
        output: the folder given as ``--output``.
        factory: ``auto``, or a FAISS factory string; one that cannot be trained on so few vectors becomes exact search
            and says so in ``warnings``. Where ``auto`` misses the recall, it tries the next dearer index that fits.
        min_recall: the limit below which nothing is published, 0 to 1.
        max_index_ram: bytes the index may take where it is searched, and its parts while they are built; default: half
            of what the machine or control group grants.
        max_latency_ms: median of single queries on one thread.
        metric: for vectors that are not normalised; default: inner product.
        progress: gets one line of text now and then.
        thorough: read the files of the index that is there, too: one whose bytes have changed is built anew.

    Returns:
        the content of ``index.json`` and ``reused``: whether the index was there already.

    Raises:
        ConfigError: nothing is committed, the factory is wrong, no index fits the memory, the folder cannot be written,
            or its shards were made with different configurations.
        IndexingError: vectors are missing, damaged or not finite, or recall or latency stay beyond the limit.
        OutputError: the disk is full.
    """
    options = IndexOptions(factory, min_recall, max_index_ram, max_latency_ms, metric)
    store = open_output(output)
    say = progress or (lambda line: None)
    with _alone(store, say):
        return _build(store, options, say, thorough)


def _build(store: Storage, options: IndexOptions, say: Say, thorough: bool) -> dict[str, Any]:
    previous = read_document(store) or {}
    corpus = open_corpus(store, previous)
    covers = bool(previous) and _covers(previous, corpus, options)
    damaged = _damaged(store, previous) if covers and thorough else ""  # an update reads the files itself
    if covers and not damaged:
        # What a build left that was killed right after it had published.
        _remove_others(store, {previous["index_file"], previous["ids_file"], (previous.get("truth") or {}).get("file")})
        return {**previous, "reused": True}
    try:
        with faiss_threads(available_cores()), _temporary(store) as files, ThreadPoolExecutor(1) as beside:
            key = corpus.id_field()
            ids = beside.submit(_write_ids, corpus, key, files["ids"])
            work = _Work(corpus, options, files["index"], ids, say)
            built = _updated_or_rebuilt(work, previous, damaged)
            for warning in built.choice.warnings:
                work.say(f"index: warning: {warning}")
            return {**_publish(work, built, key, files, previous), "reused": False}
    except MemoryError as error:
        raise IndexingError(
            f"{store.root}: not enough memory to index {corpus.num_vectors:,} vectors of {corpus.dim} dimensions as "
            f"{options.factory}; choose a smaller one, for example --index IVF1024,SQ8"
        ) from error


@contextlib.contextmanager
def _alone(store: Storage, say: Say) -> Iterator[None]:
    """One process builds at a time: each removes what others left. Whoever comes second waits, and then finds it done.

    A folder that cannot be written to has no lock, and says so once something is to be written.
    """
    waits = False
    while True:
        with contextlib.ExitStack() as stack:
            try:
                ours = stack.enter_context(store.lock(name=LOCK))
            except OSError:
                ours = True
            if ours:
                yield
                return
        if not waits:
            say("index: another process builds it; waiting until that has ended")
        waits = True
        time.sleep(0.2)


def _damaged(store: Storage, previous: dict[str, Any]) -> str:
    """The name of a file whose bytes are not those that were written; empty for none."""
    for what in ("index", "ids"):
        name = f"index/{previous[f'{what}_file']}"
        if sha256_of(store, name) != previous["sha256"][what]:
            return name
    return ""


def _covers(previous: dict[str, Any], corpus: Corpus, options: IndexOptions) -> bool:
    """Whether the index that is there is the one that would be built."""
    asked, latency = previous.get("options", {}), options.max_latency_ms
    return (
        previous["recall_at_10"]["value"] >= options.min_recall
        and (latency is None or previous["latency_ms"]["p50"] <= latency)
        and previous["fingerprint"] == corpus.fingerprint
        and previous["requested"] == options.factory
        and (asked.get("metric"), asked.get("max_index_ram")) == (options.metric, options.max_index_ram)
        and previous["shards"] == [file.record() for file in corpus.files]
        and all(
            corpus.store.size(f"index/{previous[f'{what}_file']}") == size for what, size in previous["bytes"].items()
        )
    )


@dataclass
class _Work:
    """What all attempts of one build share.

    Attributes:
        target: where the index file is written, on this machine.
        ids: the sha256 of the file of ids, which is written beside everything else.
        truth: the queries' exact neighbours among all vectors, once an attempt has found them.
    """

    corpus: Corpus
    options: IndexOptions
    target: Path
    ids: Future[str]
    say: Say
    seconds: dict[str, float] = field(default_factory=dict)
    truth: Truth | None = None

    @property
    def parts_folder(self) -> Path:
        """Beside the index; on an object store on this machine, as long as this process lives."""
        return self.target.parent / "parts"

    @property
    def metric(self) -> str:
        return L2 if self.options.metric == "l2" else INNER_PRODUCT

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - started, 3)

    def told(self, blocks: Iterable[Block], verb: str, total: int) -> Iterator[Block]:
        """The blocks; every few seconds a line says how far they are and when the last one will be done."""
        began = last = time.monotonic()
        first = None
        for block in blocks:
            first = block.position if first is None else first
            yield block
            now, done = time.monotonic(), block.position + len(block.vectors)
            if now - last > TOLD_EVERY_S:
                last = now
                left = (now - began) * (total - done) / max(1, done - first)
                self.say(f"index: {verb} {done:,} of {total:,} vectors, eta {timedelta(seconds=round(left))}")

    def parts(self, choice: Choice, **what: Any) -> Parts:
        """The finished parts of exactly this."""
        corpus = self.corpus
        what |= {
            "factory": choice.factory,
            "num_train": choice.num_train,
            "metric": self.metric,
            "dim": corpus.dim,
            "fingerprint": corpus.fingerprint,
            "shards": [(file.ordinal, file.rows, file.sha256) for file in corpus.files],
            "faiss": load_faiss().__version__,
        }
        return Parts(self.parts_folder, what)


@dataclass
class _Written:
    """An index file at its temporary place, not measured yet."""

    choice: Choice
    sha256: str
    truth: Truth
    normalized: bool


@dataclass
class _Built:
    """A measured index file, and what ``index.json`` says of it beside what was measured."""

    choice: Choice
    sha256: str
    truth: Truth
    normalized: bool
    predicted: Predicted
    measured: recall.Measured
    imbalance: float | None
    how: How
    why: str | None
    changed: Changes
    trained_on: int
    imbalance_trained: float | None
    drift: int


def _updated_or_rebuilt(work: _Work, previous: dict[str, Any], damaged: str) -> _Built:
    if not previous:
        return _rebuilt(work, "new", None)
    try:
        if damaged:
            raise Rebuild(f"{damaged} is damaged")
        return _updated(work, previous)
    except Rebuild as reason:
        work.say(f"index: built anew: {reason}")
        return _rebuilt(work, "retrained", str(reason), Changes([], [], work.corpus.num_vectors, previous["ntotal"]))


# -- anew ------------------------------------------------------------------------------------------------------------


def _rebuilt(work: _Work, how: How, why: str | None, changed: Changes | None = None) -> _Built:
    """The first choice that reaches the limits."""
    corpus, notes = work.corpus, []
    changed = changed or Changes([], [], corpus.num_vectors, 0)
    if corpus.num_lost:
        lost = f"{corpus.num_lost} commit records left out: the files they name are gone; run `embed-corpus run` again"
        notes.append(lost)
    ladder = choices(work.options, corpus.num_vectors, corpus.dim)
    for number, choice in enumerate(ladder, start=1):
        choice.warnings[:0] = notes
        predicted = _said_before(work, choice)
        try:
            written = _write(work, choice, predicted)
            measured, imbalance = _measure(work, written, predicted)
        except Missed as missed:
            shutil.rmtree(work.parts_folder, ignore_errors=True)
            if number == len(ladder):
                raise
            notes.append(f"{missed.found}; tried {ladder[number].factory} next")
            work.say(f"index: {notes[-1]}")
            continue
        trained_on, drift = corpus.num_vectors, 0
        return _Built(
            written.choice, written.sha256, written.truth, written.normalized, predicted, measured, imbalance,
            how, why, changed, trained_on, imbalance, drift,
        )  # fmt: skip
    raise AssertionError("no choice: this is a bug")


def _said_before(work: _Work, choice: Choice) -> Predicted:
    """What it will take, said and checked before anything is read."""
    corpus = work.corpus
    # A wrong factory is told before a long read, not after it.
    index_training.made(choice.factory, corpus.dim, work.metric)
    predicted = predict(choice, corpus.num_vectors, corpus.dim, work.options.max_bytes)
    lists = f", {choice.num_lists:,} lists" if choice.num_lists else ""
    train = f", trained on {choice.num_train:,}" if choice.num_train else ""
    parts = f" in {predicted.num_parts} parts" if predicted.num_parts > 1 else ""
    work.say(
        f"index: {corpus.num_vectors:,} vectors of {corpus.dim} dimensions in {len(corpus.files):,} shards; "
        f"{choice.factory}{lists}{train}: about {short_bytes(predicted.index_bytes)}, "
        f"{short_bytes(predicted.build_bytes)} of memory to build it{parts}" + (", on a GPU" if num_gpus() else "")
    )
    granted = granted_memory()
    if (predicted.build_bytes or 0) > granted:
        raise ConfigError(
            f"--index {choice.factory}: building it takes about {short_bytes(predicted.build_bytes)} of memory, "
            f"{short_bytes(granted)} are granted here; choose a smaller one, for example --index IVF1024,SQ8"
        )
    if predicted.mapped:
        choice.warnings.append(
            f"{choice.factory} takes {short_bytes(predicted.index_bytes)}, more than the "
            f"{short_bytes(work.options.max_bytes)} it may: measured from the disk"
        )
    return predicted


def _write(work: _Work, choice: Choice, predicted: Predicted) -> _Written:
    """Train, add and write; what was begun of exactly this goes on where it ended."""
    corpus = work.corpus
    parts = work.parts(choice, part_rows=predicted.part_rows) if predicted.num_parts else None
    begun = parts.begun() if parts else None
    if begun is not None and parts is not None:
        index, truth, state = begun
        choice = replace(choice, factory=state["factory"], num_lists=state["num_lists"], warnings=state["warnings"])
        normalized = state["normalized"]
        work.say(f"index: trained before, {len(parts.finished())} of {predicted.num_parts} parts finished; going on")
    else:
        choice, index, truth, normalized = _trained(work, choice)
    truth = work.truth or truth
    if parts is None or frame(index) is None:
        sha256 = _as_a_whole(work, index, truth)
    else:
        if begun is None:
            state = {"normalized": normalized, "factory": choice.factory, "num_lists": choice.num_lists}
            with _written(corpus.store):
                parts.begin(index, truth, {**state, "warnings": choice.warnings})
        sha256 = _in_parts(work, corpus, index, truth, parts, predicted.part_rows)
    return _Written(choice, sha256, truth, normalized)


def _trained(work: _Work, choice: Choice) -> tuple[Choice, Any, Truth, bool]:
    """The choice as it was made, the trained, empty index, the queries, and whether all vectors are of unit length."""
    corpus, options = work.corpus, work.options
    queries_at, train_at = recall.draw(corpus.num_vectors, choice.num_train)
    queries, sample = Sample(queries_at, corpus.dim), Sample(train_at, corpus.dim, np.float16)
    with work.timed("scan"), Prefetch(corpus.blocks()) as blocks:
        normalized = scan(work.told(blocks, "checked", corpus.num_vectors), [queries, sample])
        if not normalized and len(train_at):  # half precision is only for numbers that are not large
            sample = Sample(train_at, corpus.dim)
            scan(corpus.blocks(), [sample])
    if normalized and options.metric is not None:
        raise ConfigError(
            f"--metric {options.metric}: these vectors are of unit length, which inner product, cosine and L2 rank "
            "alike; leave it out"
        )
    if not normalized and options.metric is None:
        choice.warnings.append(
            "vectors are not of unit length: ranked by inner product, which favours long vectors; --metric says how"
        )
    with work.timed("train"):
        if choice.adaptable:
            whole = index_bytes("IDMap2,Flat", corpus.num_vectors, corpus.dim) or 0
            choice = choice.fitted(index_training.num_different(sample.vectors), whole <= options.max_bytes)
        if choice.num_train:
            work.say(f"index: training on {len(train_at):,} vectors")
        index = index_training.trained(choice, sample.vectors, work.metric)
    truth = Truth(corpus.faiss_ids(queries_at), queries.vectors, work.metric)
    return choice, index, truth, normalized


def _as_a_whole(work: _Work, index: Any, truth: Truth) -> str:
    """Fill an index in memory and write it; returns its sha256."""
    corpus, adding = work.corpus, index_training.Adding(index)
    with work.timed("add"), Prefetch(corpus.blocks()) as blocks:
        for block in work.told(blocks, "added", corpus.num_vectors):
            adding.add(block)
            if work.truth is None:
                truth.add(block, alone=corpus.num_vectors == 1)
    if index.ntotal != corpus.num_vectors:
        raise IndexingError(f"{corpus.store.root}: the index holds {index.ntotal} vectors of {corpus.num_vectors}")
    work.truth = truth
    with work.timed("write"), _written(corpus.store):
        faiss = load_faiss()
        with Writing(work.target) as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, WRITTEN_AT_ONCE))
        return file.sha256


def _in_parts(
    work: _Work, rows: Corpus, index: Any, truth: Truth, parts: Parts, part_rows: int, others: Sequence[Lists] = ()
) -> str:
    """Add ``rows`` part by part, from the first that is not finished, and merge the parts behind the lists of others.

    Args:
        index: trained and empty.
        truth: of the finished parts and of the others.

    Returns:
        the sha256 of the index file.
    """
    corpus, total, adding = work.corpus, rows.num_vectors, index_training.Adding(index)
    first = len(parts.finished()) * part_rows
    with work.timed("add"), Filling(parts, index) as filling, Prefetch(rows.blocks(first=first)) as blocks:
        for block in work.told(blocks, "added", total):
            while len(block.vectors):
                piece = block.before(part_rows - index.ntotal)
                block = block.after(len(piece.vectors))
                adding.add(piece)
                if work.truth is None:
                    truth.add(piece)
                if index.ntotal == part_rows or piece.position + len(piece.vectors) == total:
                    with _written(corpus.store):
                        filling.keep(truth)
        with _written(corpus.store):
            filling.wait()
    work.truth = truth
    with work.timed("write"), _written(corpus.store):
        head = frame(index, corpus.num_vectors)
        assert head is not None
        return merge(work.target, head, [*others, *map(Lists, filling.finished)])


def _write_ids(corpus: Corpus, key: pa.Field, path: Path) -> str:
    """The file that names the rows; returns its sha256."""
    write_ids(corpus, key, path)
    return sha256_file(path)


def _measure(work: _Work, written: _Written, predicted: Predicted) -> tuple[recall.Measured, float | None]:
    """Open what was written and measure it; and how unevenly its lists are filled, 1 is even."""
    faiss, corpus, path = load_faiss(), work.corpus, work.target
    with _written(corpus.store):
        work.ids.result()  # it would take a core from the searches that are timed
    give_back()
    with work.timed("tune"):
        # Lists are searched where they lie, in the memory that caches the file: a copy of them takes seconds.
        mapped = predicted.mapped or written.choice.num_lists
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if mapped else 0)
        except RuntimeError as error:
            raise IndexingError(f"{path}: the written index cannot be read back ({faiss_reason(error)})") from error
        ivf = faiss.try_extract_index_ivf(index)
        held = index.ntotal if ivf is None else ivf.invlists.compute_ntotal()
        if (index.ntotal, held) != (corpus.num_vectors, corpus.num_vectors):
            raise IndexingError(
                f"{path}: the written index says {index.ntotal:,} vectors and holds {held:,}, expected "
                f"{corpus.num_vectors:,}; not published"
            )
        options = work.options
        measured = recall.tune(
            index, written.truth, corpus, written.choice.factory, options.min_recall, options.max_latency_ms
        )
        return measured, None if ivf is None else round(float(ivf.invlists.imbalance_factor()), 4)


# -- updated ---------------------------------------------------------------------------------------------------------


def _updated(work: _Work, previous: dict[str, Any]) -> _Built:
    """The index that is there, without the rows that went and with those that came.

    Raises:
        Rebuild: it cannot be, or would not be good enough.
    """
    corpus, store, options = work.corpus, work.corpus.store, work.options
    check_updatable(previous, corpus, options)
    changed = changes(previous, corpus)
    rows = corpus.part(changed.added)
    work.say(
        f"index: {previous['factory']}: {changed.added_rows:,} vectors to add and {changed.dropped_rows:,} to drop of "
        f"{previous['ntotal']:,}"
    )
    choice = Choice(previous["factory"], previous["num_train"], 1)
    predicted = predict(choice, corpus.num_vectors, corpus.dim, options.max_bytes, rows.num_vectors)
    name = f"index/{previous['index_file']}"
    path = store.fetch(name)
    try:
        with ThreadPoolExecutor(1) as pool:
            sha256 = pool.submit(sha256_file, path)  # beside the rest: it reads all of the file
            normalized = _scanned(work, rows) and previous["normalized"]
            index, head = emptied(path)
            old = _old_lists(path, len(head), changed.dropped)
            parts = work.parts(choice, part_rows=predicted.part_rows, onto=previous["sha256"]["index"])
            begun = parts.begun()
            truth = begun[1] if begun else kept_truth(store, previous, changed.dropped)
            if not begun:
                with _written(store):
                    parts.begin(index, truth, {})
            written = _in_parts(work, rows, index, truth, parts, predicted.part_rows, [old])
            if sha256.result() != previous["sha256"]["index"]:
                raise Rebuild(f"{name} is damaged")
    finally:
        store.release(name)
    del index
    drift = previous["truth"]["drift"] + changed.added_rows + changed.dropped_rows
    truth.drop_unknown(corpus.num_vectors)
    if drift > MAX_DRIFT * corpus.num_vectors or len(truth.ids) < MIN_QUERIES:
        work.say("index: much has changed: finding the exact neighbours of other queries")
        truth, drift = _new_truth(work), 0
    try:
        measured, imbalance = _measure(work, _Written(choice, written, truth, normalized), predicted)
    except Missed as missed:
        raise Rebuild(missed.found) from missed
    before = previous["imbalance_trained"]
    if imbalance is not None and imbalance > MAX_IMBALANCE * before:
        raise Rebuild(f"its lists are filled unevenly: {imbalance:.2f}, {before:.2f} when it was trained")
    return _Built(
        choice, written, truth, normalized, predicted, measured, imbalance,
        "updated", None, changed, previous["trained_on"], before, drift,
    )  # fmt: skip


def _scanned(work: _Work, rows: Corpus) -> bool:
    with work.timed("scan"):
        return scan(work.told(rows.blocks(), "checked", rows.num_vectors))


def _old_lists(path: Path, start: int, dropped: Sequence[int]) -> Lists:
    try:
        return Lists(path, start, dropped)
    except IndexingError as error:
        raise Rebuild(str(error)) from error


def _new_truth(work: _Work) -> Truth:
    """One read of all vectors, and another one for the queries. Some of these may have been trained on."""
    corpus = work.corpus
    with work.timed("truth"):
        positions, _ = recall.draw(corpus.num_vectors, 0)
        truth = Truth(corpus.faiss_ids(positions), corpus.vectors_at(positions), work.metric)
        with Prefetch(corpus.blocks()) as blocks:
            for block in work.told(blocks, "compared", corpus.num_vectors):
                truth.add(block)
    return truth


# -- published -------------------------------------------------------------------------------------------------------


def _publish(
    work: _Work, built: _Built, key: pa.Field, files: dict[str, Path], previous: dict[str, Any]
) -> dict[str, Any]:
    corpus, store = work.corpus, work.corpus.store
    with work.timed("publish"), _written(store):
        built.truth.save(files["truth"])
        sums = {"index": built.sha256, "ids": work.ids.result(), "truth": sha256_file(files["truth"])}
        sizes = {what: path.stat().st_size for what, path in files.items()}
        # Named by content: a new build never overwrites a file that the old index.json names, unless it equals it.
        generation = hashlib.sha256((sums["index"] + sums["ids"]).encode()).hexdigest()[:12]
        names = {
            "index": f"index-{generation}.faiss",
            "ids": f"ids-{generation}.parquet",
            "truth": f"truth-{sums['truth'][:12]}.parquet",
        }
        for what, name in names.items():
            store.publish(files[what], f"index/{name}")
    document = _document(work, built, key, previous) | {f"{what}_file": names[what] for what in ("index", "ids")}
    document["truth"] |= {"file": names["truth"], "sha256": sums.pop("truth"), "bytes": sizes.pop("truth")}
    per_vector = round(sizes["index"] / corpus.num_vectors, 2)
    document |= {"sha256": sums, "bytes": sizes, "bytes_per_vector": per_vector}
    with _written(store):
        store.write_json(NAME, document)
    _remove_others(store, {*names.values()})
    return document


def _document(work: _Work, built: _Built, key: pa.Field, previous: dict[str, Any]) -> dict[str, Any]:
    corpus, measured, changed = work.corpus, built.measured, built.changed
    setting = measured.setting
    return {
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "built": built.how,
        "why": built.why,
        "added_rows": changed.added_rows,
        "removed_rows": changed.dropped_rows,
        "fingerprint": corpus.fingerprint,
        "requested": work.options.factory,
        "options": work.options.record(),
        "factory": built.choice.factory,
        "metric": work.metric,
        "normalized": built.normalized,
        "ntotal": corpus.num_vectors,
        "dim": corpus.dim,
        "nprobe": setting.value if setting.name == "nprobe" else None,
        "ef_search": setting.value if setting.name == "efSearch" else None,
        **{f"recall_at_{k}": record for k, record in measured.recalls.items()},
        "settings": [setting.record() for setting in measured.tried],
        "latency_ms": measured.latency_ms,
        "truth": {"queries": len(built.truth.ids), "drift": built.drift},
        "trained_on": built.trained_on,
        "num_train": built.choice.num_train,
        "imbalance": built.imbalance,
        "imbalance_trained": built.imbalance_trained,
        "predicted": built.predicted.record(),
        "peak_memory_bytes": peak_memory_bytes(),
        "id_column": key.name,
        "chunked": any(file.chunked for file in corpus.files),
        "shards": [file.record() for file in corpus.files],
        "next_ordinal": max(previous.get("next_ordinal", 0), *(file.ordinal + 1 for file in corpus.files)),
        "warnings": built.choice.warnings,
        "seconds": work.seconds,
    }


@contextlib.contextmanager
def _temporary(store: Storage) -> Iterator[dict[str, Path]]:
    """Temporary names for the files; whatever is left under them in the end is removed."""
    files: dict[str, Path] = {}
    try:
        with _written(store):
            for what, name in (("index", "index.faiss"), ("ids", "ids.parquet"), ("truth", "truth.parquet")):
                files[what] = store.temporary(f"index/{name}")
        yield files
    finally:
        for path in files.values():
            with contextlib.suppress(OSError):  # a folder that cannot be written: the error says so
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError, KeyError):  # stays unless nothing is in it
            files["index"].parent.rmdir()


@contextlib.contextmanager
def _written(store: Storage) -> Iterator[None]:
    """What goes wrong while writing, in one line of ours."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: FAISS' own writer
        place = store.location("index")
        if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(f"{place}: cannot be written ({one_line(error)})") from error
        raise OutputError(
            f"{place}: the index cannot be written ({faiss_reason(error)}); the old one, if any, is untouched. "
            "Make room, then run `embed-corpus index` again"
        ) from error


def _remove_others(store: Storage, keep: set[str | None]) -> None:
    """Older generations, parts and what a crash left. Failing to remove them harms nobody: nothing names them."""
    ours = r"(index-\w+\.faiss|ids-\w+\.parquet|truth-\w+\.parquet|\.(index|ids|truth)\..*\.tmp)"
    with contextlib.suppress(OSError, EmbedCorpusError):
        for name in list(store.files("index", "", hidden=True)):
            base = name.removeprefix("index/")
            if re.fullmatch(ours, base) and base not in keep:
                store.remove(name)
        store.remove_tree(PARTS)


def _end_with_the_parent(parent: int) -> None:
    """Nobody would hear of what is built for a command that was killed, and the next one would wait for it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(EXIT_STOPPED)


def main(arguments: list[str] | None = None) -> int:
    """``python -m pipeline.indexer OUTPUT``: progress on stderr, index.json's content on stdout, our exit codes."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.indexer", description=main.__doc__)
    parser.add_argument("output")
    parser.add_argument("--factory", default="auto")
    parser.add_argument("--min-recall", type=float, default=0.95)
    parser.add_argument("--max-index-ram", help="such as 8GB")
    parser.add_argument("--max-latency-ms", type=float)
    parser.add_argument("--metric", choices=["ip", "l2"])
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--check-dim", type=int, help="build nothing, only see whether FAISS can make the factory")
    options = parser.parse_args(arguments)
    say = functools.partial(print, file=sys.stderr, flush=True)
    threading.Thread(target=_end_with_the_parent, args=(os.getppid(),), daemon=True).start()
    # Read by OpenMP when FAISS is loaded, so before it.
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    try:
        if options.check_dim:
            [choice] = choices(IndexOptions(options.factory), 1, options.check_dim)
            index_training.made(choice.factory, options.check_dim)
            print("{}")
            return 0
        document = build_index(
            options.output,
            options.factory,
            min_recall=options.min_recall,
            max_index_ram=parse_size(options.max_index_ram) if options.max_index_ram else None,
            max_latency_ms=options.max_latency_ms,
            metric=options.metric,
            progress=say,
            thorough=options.thorough,
        )
    except EmbedCorpusError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
