"""Inverted lists, built and kept part by part -> one index file, however little memory there is.

A part is the lists of some vectors, written once they are full. Parts, and an index that is there already, are merged
list by list into a new file: what FAISS writes for the trained, empty index, and behind it the lists in the form in
which FAISS writes them (``ilar``), so that the result is an ordinary index file. Rows of shards that changed or went
are left out on the way.

Finished parts lie in ``index/parts/<what is built>/``: a build that was interrupted goes on after the last of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.corpus import Positions
from pipeline.errors import IndexingError
from pipeline.faiss_library import load_faiss
from pipeline.index_choice import CHUNK_BYTES
from pipeline.prefetch import Follow
from pipeline.recall import Truth
from pipeline.storage import TEMPORARY_SUFFIX

HEAD = struct.Struct("<4sQQ4s")  # kind of lists, number of lists, bytes of a code, form of the sizes
KIND, ALL, SOME = b"ilar", b"full", b"sprs"
ID_BYTES = 8


def frame(index: Any, num_vectors: int = 0) -> bytes | None:
    """What comes before the lists in the file of an index that holds so many vectors.

    None for a kind that has no inverted lists, or keeps them in another form.

    Args:
        index: trained and empty.
    """
    faiss = load_faiss()
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is None or isinstance(ivf, faiss.IndexIVFFlatDedup):
        return None
    empty = HEAD.pack(KIND, ivf.nlist, ivf.code_size, SOME) + struct.pack("<Q", 0)
    ivf.ntotal = index.ntotal = num_vectors
    written = faiss.serialize_index(index)
    ivf.ntotal = index.ntotal = 0
    return written[: -len(empty)].tobytes() if written[-len(empty) :].tobytes() == empty else None


class Lists:
    """Inverted lists that stand at the end of a file.

    Args:
        path: the file.
        start: where in it they begin.
        without: ordinals of shards whose rows do not count.

    Attributes:
        sizes: (num_lists,) int64, the rows that count.

    Raises:
        IndexingError: there are no such lists.
    """

    def __init__(self, path: Path, start: int = 0, without: Sequence[int] = ()) -> None:
        self.path, self._without = path, np.array(without, dtype=np.int64)
        with open(path, "rb") as file:
            file.seek(start)
            head = file.read(HEAD.size)
            kind, num_lists, self.code_bytes, form = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0, b"")
            if kind != KIND or form not in (ALL, SOME):
                raise IndexingError(f"{path}: no inverted lists where they should begin; remove the file, run again")
            (count,) = struct.unpack("<Q", file.read(8))
            numbers = np.frombuffer(file.read(8 * count), dtype="<i8")
            body = file.tell()
            self._held = np.zeros(num_lists, dtype=np.int64)
            if form == ALL:
                self._held[:] = numbers
            else:
                self._held[numbers[::2]] = numbers[1::2]
            bytes_of = self._held * (self.code_bytes + ID_BYTES)
            self._starts = body + np.concatenate([[0], np.cumsum(bytes_of)])
            if os.fstat(file.fileno()).st_size < self._starts[-1]:
                raise IndexingError(f"{path}: cut; remove the file, run again")
            self.sizes = self._counted(file) if len(self._without) else self._held

    def _counted(self, file: BinaryIO) -> Positions:
        """Only ids are read for it."""
        sizes = np.zeros_like(self._held)
        for number in np.flatnonzero(self._held):
            held = int(self._held[number])
            at = int(self._starts[number]) + held * self.code_bytes
            sizes[number] = self._counts(os.pread(file.fileno(), held * ID_BYTES, at)).sum()
        return sizes

    def _counts(self, ids: bytes | memoryview) -> NDArray[np.bool_]:
        return ~np.isin(np.frombuffer(ids, dtype=np.int64) >> 32, self._without)

    def read(self, first: int, last: int) -> list[tuple[Any, Any]]:
        """Codes and ids, as bytes, of the lists from ``first`` to before ``last``; one read."""
        begin, end = int(self._starts[first]), int(self._starts[last])
        with open(self.path, "rb") as file:
            file.seek(begin)
            content = memoryview(file.read(end - begin))
        lists = []
        for number in range(first, last):
            at, held = int(self._starts[number]) - begin, int(self._held[number])
            border, stop = at + held * self.code_bytes, at + held * (self.code_bytes + ID_BYTES)
            codes, ids = content[at:border], content[border:stop]
            lists.append((codes, ids) if self.sizes[number] == held else self._filtered(codes, ids))
        return lists

    def _filtered(self, codes: memoryview, ids: memoryview) -> tuple[Any, Any]:
        counts = self._counts(ids)
        rows = np.frombuffer(codes, dtype=np.uint8).reshape(len(counts), self.code_bytes)
        return rows[counts].tobytes(), np.frombuffer(ids, dtype=np.int64)[counts].tobytes()


def merge(target: Path, head: bytes, sources: Sequence[Lists]) -> str:
    """Write an index file of the lists of all sources; returns its sha256.

    Args:
        target: to be written.
        head: what comes before the lists, the number of vectors in it.
        sources: at least one, all of one kind.

    Raises:
        OSError: it cannot be written.
    """
    sizes = sum((source.sizes for source in sources[1:]), sources[0].sizes)
    digest = hashlib.sha256()
    with open(target, "wb") as file, Follow(digest.update, depth=2) as hashing:
        for piece in _pieces(head, sizes, sources):
            file.write(piece)
            hashing.put(piece)
    return digest.hexdigest()


def _pieces(head: bytes, sizes: Positions, sources: Sequence[Lists]) -> Iterator[bytes]:
    code_bytes = sources[0].code_bytes
    yield head + HEAD.pack(KIND, len(sizes), code_bytes, ALL) + struct.pack("<Q", len(sizes))
    yield sizes.astype("<i8").tobytes()
    for first, last in _stretches(sizes * (code_bytes + ID_BYTES)):
        if last - first == 1:  # may be a long one: no more of it at once than one source has
            for part in (0, 1):
                for source in sources:
                    yield bytes(source.read(first, last)[0][part])
        else:
            lists = zip(*(source.read(first, last) for source in sources), strict=True)
            yield b"".join(of_source[part] for of_sources in lists for part in (0, 1) for of_source in of_sources)


def _stretches(num_bytes: Positions) -> Iterator[tuple[int, int]]:
    """Neighbouring lists that make up about a chunk; a longer list stands alone."""
    first, total = 0, 0
    for number, size in enumerate(num_bytes.tolist()):
        if total and total + size > CHUNK_BYTES:
            yield first, number
            first, total = number, 0
        total += size
    yield first, len(num_bytes)


class Parts:
    """The finished parts of what is being built.

    Args:
        folder: for them, on this machine; of one build at a time.
        what: all that the parts depend on.
    """

    def __init__(self, folder: Path, what: Any) -> None:
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = folder / name

    def begin(self, index: Any, truth: Truth, state: dict[str, Any]) -> None:
        """Keep a trained, empty index; what lies there of other builds is removed."""
        shutil.rmtree(self._folder.parent, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._keep("trained.faiss", lambda path: load_faiss().write_index(index, str(path)))
        self._keep("truth-0.parquet", truth.save)
        self._keep("state.json", lambda path: path.write_text(json.dumps(state), encoding="utf-8"))  # the last one

    def begun(self) -> tuple[Any, Truth, dict[str, Any]] | None:
        """The trained, empty index, the truth after the finished parts, and the state; None where there is nothing."""
        try:
            state = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            truth = Truth.load(self._folder / f"truth-{len(self.finished())}.parquet")
            return load_faiss().read_index(str(self._folder / "trained.faiss")), truth, state
        except (OSError, ValueError, RuntimeError, pa.ArrowException):
            return None  # never begun, or damaged

    def finished(self) -> list[Path]:
        """The files of the finished parts, in order."""
        paths = (self._folder / f"part-{number}.lists" for number in itertools.count())
        return list(itertools.takewhile(Path.exists, paths))

    def add(self, number: int, index: Any, truth: Truth) -> Path:
        """Keep the lists of a part and the truth after it."""
        faiss = load_faiss()

        def write(path: Path) -> None:
            writer = faiss.FileIOWriter(str(path))
            faiss.write_InvertedLists(faiss.extract_index_ivf(index).invlists, writer)
            del writer  # closes the file, and would not say if the disk is full
            if int(Lists(path).sizes.sum()) != index.ntotal:
                raise OSError("a part was cut while it was written")

        self._keep(f"truth-{number + 1}.parquet", truth.save)
        kept = self._keep(f"part-{number}.lists", write)
        (self._folder / f"truth-{number}.parquet").unlink(missing_ok=True)
        return kept

    def _keep(self, name: str, write: Callable[[Path], Any]) -> Path:
        """A file that is there is whole, whenever the process or the machine dies."""
        path, temporary = self._folder / name, self._folder / f".{name}{TEMPORARY_SUFFIX}"
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return path
