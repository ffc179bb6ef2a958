"""An index and the shards as they are now -> what has to be added and dropped, or why it is better built anew.

Shards are told apart by the sha256 of their vectors. What an update reads of the others is nothing: the exact
neighbours of the held-out queries are kept from build to build.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.corpus import Corpus
from pipeline.faiss_library import load_faiss
from pipeline.index_choice import IndexOptions, index_bytes
from pipeline.index_parts import frame
from pipeline.memory import short_bytes
from pipeline.recall import Truth
from pipeline.storage import Storage, sha256_file

MAX_GROWTH = 2.0
"""Lists that were trained on half of the vectors, or on twice as many, are too few or too many."""
MAX_IMBALANCE = 1.5
"""Times that of the last training; a search takes as much longer."""
MAX_DRIFT = 0.1
"""Share of the vectors that came or went since the held-out queries were drawn from all of them."""
MIN_QUERIES = 100

EXPECTED = ("trained_on", "num_train", "imbalance_trained", "truth", "options", "built")


class Rebuild(Exception):
    """The index has to be built anew; the text says why."""


@dataclass(frozen=True)
class Changes:
    """Ordinals of shards whose vectors are to be added and of those to be dropped; a changed shard is in both."""

    added: list[int]
    dropped: list[int]
    added_rows: int
    dropped_rows: int


def changes(previous: dict[str, Any], corpus: Corpus) -> Changes:
    """What has become of the shards since ``index.json`` was written."""
    old = {shard["ordinal"]: (shard["rows"], shard["sha256"]) for shard in previous["shards"]}
    new = {file.ordinal: (file.rows, file.sha256) for file in corpus.files}
    added = [ordinal for ordinal in new if old.get(ordinal) != new[ordinal]]
    dropped = [ordinal for ordinal in old if old[ordinal] != new.get(ordinal)]
    return Changes(added, dropped, sum(new[at][0] for at in added), sum(old[at][0] for at in dropped))


def check_updatable(previous: dict[str, Any], corpus: Corpus, options: IndexOptions) -> None:
    """See without reading anything whether an update will do.

    Raises:
        Rebuild: it will not.
    """
    if any(name not in previous for name in EXPECTED):
        raise Rebuild("the index is of an earlier version")
    if previous["fingerprint"] != corpus.fingerprint:
        raise Rebuild("its vectors are of another configuration")
    for name, is_now, was in (
        ("--index", options.factory, previous["requested"]),
        ("--metric", options.metric, previous["options"]["metric"]),
    ):
        if is_now != was:
            raise Rebuild(f"{name} is {is_now} now and was {was}")
    factory, trained_on = previous["factory"], previous["trained_on"]
    if not re.search(r"(^|,)IVF", factory):
        raise Rebuild(f"{factory} is not made of lists that rows can be added to and taken from")
    grown = corpus.num_vectors / max(1, trained_on)
    if not 1 / MAX_GROWTH <= grown <= MAX_GROWTH:
        raise Rebuild(f"{corpus.num_vectors:,} vectors, trained when there were {trained_on:,}")
    size = index_bytes(factory, corpus.num_vectors, corpus.dim)
    if options.factory == "auto" and (size or 0) > options.max_bytes:
        raise Rebuild(f"{factory} would take {short_bytes(size)}, --max-index-ram is {short_bytes(options.max_bytes)}")
    files = {f"index/{previous[f'{what}_file']}": size for what, size in previous["bytes"].items()}
    files[f"index/{previous['truth']['file']}"] = previous["truth"]["bytes"]
    for name, size in files.items():
        if corpus.store.size(name) != size:
            raise Rebuild(f"{name} is missing or cut")


def emptied(path: Path) -> tuple[Any, bytes]:
    """The trained index of an index file, without its vectors, and what stands before the lists in the file.

    Raises:
        Rebuild: its lists are kept in another form.
    """
    faiss = load_faiss()
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    except RuntimeError:
        raise Rebuild(f"{path.name} cannot be read") from None
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is None:
        raise Rebuild(f"{path.name} has no lists")
    lists = faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size)
    ivf.replace_invlists(lists, True)
    lists.this.disown()  # the index frees them
    head = frame(index)
    if head is None:
        raise Rebuild("lists of this kind cannot be merged")
    return index, head


def kept_truth(store: Storage, previous: dict[str, Any], dropped: Sequence[int]) -> Truth:
    """The queries that are left of the last build and their neighbours that are left.

    Raises:
        Rebuild: the file is damaged.
    """
    name = f"index/{previous['truth']['file']}"
    path = store.fetch(name)
    try:
        if sha256_file(path) != previous["truth"]["sha256"]:
            raise Rebuild(f"{name} is damaged")
        truth = Truth.load(path)
    except (OSError, pa.ArrowException) as error:
        raise Rebuild(f"{name} cannot be read") from error
    finally:
        store.release(name)
    truth.drop(dropped)
    return truth
