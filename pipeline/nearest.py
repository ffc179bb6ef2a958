"""A FAISS index and (n, dim) query vectors -> the ids nearest to them, among all rows or among those of a filter.

The index is searched at the setting whose recall was measured, and wider where that finds fewer rows than there are.
Among some rows as many of *them* are looked at as without a filter, and all of them where they are few: a filter does
not cost recall. Settings go with each search, the index itself never changes.

FAISS' threads do not survive a fork: a child that forked after a search would wait for them for ever. In such a child
FAISS works on one thread.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.corpus import Positions, Vectors
from pipeline.recall import faiss_threads, load_faiss, set_parameter
from pipeline.threads import available_cores

SETTINGS = {"nprobe": "nprobe", "efSearch": "ef_search"}
"""FAISS' name of a search parameter: where index.json has its measured value."""
PARAMETERS = {
    None: ("SearchParameters", ""),
    "nprobe": ("SearchParametersIVF", "nprobe"),
    "efSearch": ("SearchParametersHNSW", "efSearch"),
}
"""FAISS' name of a search parameter: the class that holds it for one search, and its name there."""

FEW = 10_000
"""So many rows of a filter are all compared: a few milliseconds."""
PAIRS_AT_ONCE = 4 << 20
"""Of query and list, or query and hit: 48 MB. A search wide open on 65,536 lists takes 64 queries at once."""
MAP_NORESERVE = 0x4000  # Linux; Python has no name for it


def read_index(path: Path, factory: str, *, mapped: bool = False) -> Any:
    """The FAISS index in a file that was checked before: FAISS maps one that was cut without noticing.

    Args:
        path: the file.
        factory: what was built.
        mapped: leave it on the disk, and read what a search needs.
    """
    faiss = load_faiss()
    if not mapped:
        return faiss.read_index(str(path))
    if not re.search(r"(^|,)(IVF|IMI)", factory):
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    lists.prefetch_nthread = 0  # threads of each search that a forked child would wait for, and crash
    return index


class Allowed:
    """The rows that may be found.

    Args:
        ids: (m,) FAISS ids, ascending and different.
        num_ordinals: all are below ``num_ordinals << 32``.
    """

    def __init__(self, ids: Positions, num_ordinals: int) -> None:
        self.ids, self._num_ordinals = ids, num_ordinals

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def selector(self) -> Any:
        """What FAISS asks for each row: one bit of a map of all ids there can be.

        The ids are far apart, so the map is large, but only pages with a bit in them take memory: an eighth of a byte
        a row, where FAISS' set of ids takes 52 bytes.
        """
        faiss, size = load_faiss(), self._num_ordinals << 29
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except (OSError, ValueError):  # address space is limited (ulimit -v), or not Linux
            return faiss.IDSelectorBatch(self.ids)
        self._bits = np.frombuffer(memory, dtype=np.uint8)  # FAISS keeps only a pointer
        np.bitwise_or.at(self._bits, self.ids >> 3, (1 << (self.ids & 7)).astype(np.uint8))
        return faiss.IDSelectorBitmap(size, faiss.swig_ptr(self._bits))


class Nearest:
    """An index at its measured setting.

    Args:
        index: the FAISS index.
        document: the content of its ``index.json``.
    """

    def __init__(self, index: Any, document: dict[str, Any]) -> None:
        self._index, self._faiss = index, load_faiss()
        self._ntotal = int(document["ntotal"])
        ivf = self._faiss.try_extract_index_ivf(index)
        self._inverted = ivf is not None
        self._most = int(ivf.nlist) if ivf is not None else self._ntotal
        self._parameter = next((name for name, key in SETTINGS.items() if document[key] is not None), None)
        self._effort = int(document[SETTINGS[self._parameter]]) if self._parameter else self._most
        set_parameter(index, self._parameter, self._effort)

    def search(self, vectors: Vectors, k: int) -> tuple[Vectors, Positions]:
        """(n, k) scores and FAISS ids, best first, k at most the number of rows; -1 only where a graph index has parts
        that nothing leads to."""
        with threads():
            return self._search(vectors, k, self._effort)

    def search_among(self, vectors: Vectors, k: int, allowed: Allowed) -> tuple[Vectors, Positions]:
        """As ``search``, k at most the rows allowed; all -1 where this kind of index cannot search some rows only."""
        few = len(allowed) <= FEW
        with threads():
            if few and not self._inverted:
                return self._compare(vectors, k, allowed.ids)
            # By the share that is allowed, rounded up.
            effort = self._most if few else min(self._most, -(-self._effort * self._ntotal // len(allowed)))
            try:
                return self._search(vectors, k, effort, allowed.selector)
            except RuntimeError:  # additive quantizers, and others that take no parameters for a search
                return _nothing(len(vectors), k)

    def _search(self, vectors: Vectors, k: int, effort: int, selector: Any = None) -> tuple[Vectors, Positions]:
        scores, ids = _nothing(len(vectors), k)
        if k == 0:
            return scores, ids
        short = np.arange(len(vectors))
        while short.size:
            step = max(1, PAIRS_AT_ONCE // max(k, effort if self._inverted else 1))
            for some in (short[at : at + step] for at in range(0, len(short), step)):
                settings = self._settings(effort, selector)
                scores[some], ids[some] = self._index.search(vectors[some], k, params=settings)
            if effort >= self._most:
                break
            # The lists probed held fewer than ``k`` vectors, or the graph walk ended early: search wider.
            short = np.flatnonzero((ids < 0).any(axis=1))
            effort = min(2 * effort, self._most)
        return scores, ids

    def _settings(self, effort: int, selector: Any) -> Any:
        kind, name = PARAMETERS[self._parameter]
        chosen = {name: effort} if self._parameter else {}
        if selector is not None:
            chosen["sel"] = selector
        return getattr(self._faiss, kind)(**chosen) if chosen else None

    def _compare(self, vectors: Vectors, k: int, ids: Positions) -> tuple[Vectors, Positions]:
        """Every row allowed, as the index keeps it."""
        if k == 0:
            return _nothing(len(vectors), 0)
        kept = self._index.reconstruct_batch(ids)
        scores, places = self._faiss.knn(vectors, kept, k, metric=self._index.metric_type)
        return scores, ids[places]


def _nothing(num_queries: int, k: int) -> tuple[Vectors, Positions]:
    return np.full((num_queries, k), np.nan, dtype=np.float32), np.full((num_queries, k), -1, dtype=np.int64)


@contextlib.contextmanager
def threads() -> Iterator[None]:
    """FAISS on the cores this process may use, and afterwards on as many as before: torch may count on the same."""
    global _used
    _used = True
    with faiss_threads(1 if _forked else available_cores()):
        yield


_used = _forked = False


def _note_fork() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_note_fork)
