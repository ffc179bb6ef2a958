"""Inverted lists, built and kept part by part -> one index file, however little memory there is.

A part is the lists of some vectors, written once they are full. Parts, and an index that is there already, are merged
list by list into a new file: what FAISS writes for the trained, empty index, and behind it the lists in the form in
which FAISS writes them (``ilar``), so that the result is an ordinary index file. Rows of shards that changed or went
are left out on the way.

Finished parts lie in ``index/parts/<what is built>/``: a build that was interrupted goes on after the last of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
SYNCED_BYTES = 256 << 20


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


class Writing:
    """A large file that is hashed, and brought to the disk, while it is written; use it as a context manager.

    Attributes:
        sha256: of all that was written, after the end.
    """

    sha256 = ""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - closed in __exit__
        self._digest, self._not_synced = hashlib.sha256(), 0
        self._behind = Follow(self._take, depth=2)

    def __enter__(self) -> Writing:
        self._behind.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._behind.__exit__()
        self._file.close()
        self.sha256 = self._digest.hexdigest()

    def write(self, piece: bytes) -> int:
        """Append a piece; returns its length.

        Raises:
            OSError: there is no room.
        """
        self._behind.put(piece)
        return self._file.write(piece)

    def _take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._not_synced += len(piece)
        if self._not_synced > SYNCED_BYTES:
            self._not_synced = 0
            with contextlib.suppress(OSError):  # whoever publishes the file syncs it, and is told
                os.fdatasync(self._file.fileno())


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
    with Writing(target) as file:
        for piece in _pieces(head, sizes, sources):
            file.write(piece)
    return file.sha256


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

    def keep_truth(self, number: int, truth: Truth) -> None:
        """Keep the truth before the part of that number; comes before the part before it."""
        self._keep(f"truth-{number}.parquet", truth.save)

    def keep(self, number: int, lists: Any, num_vectors: int) -> Path:
        """Keep the lists of a part, which hold so many vectors."""
        faiss = load_faiss()

        def write(path: Path) -> None:
            writer = faiss.FileIOWriter(str(path))
            faiss.write_InvertedLists(lists, writer)
            del writer  # closes the file, and would not say if the disk is full
            if int(Lists(path).sizes.sum()) != num_vectors:
                raise OSError("a part was cut while it was written")

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


class Filling:
    """An index whose lists are kept as parts: one part is written while the next one is filled.

    Use it as a context manager; leaving it leaves the index empty.

    Args:
        parts: where they are kept.
        index: trained and empty.

    Attributes:
        finished: the files of the parts that are there, in order; complete after ``wait``.
    """

    def __init__(self, parts: Parts, index: Any) -> None:
        self._parts, self._index, self.finished = parts, index, parts.finished()
        self._ivf = load_faiss().extract_index_ivf(index)
        self._filled, self._written = self._lists(), self._lists()
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[Path] | None = None

    def __enter__(self) -> Filling:
        self._ivf.replace_invlists(self._filled, False)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        fresh = self._lists()
        self._ivf.replace_invlists(fresh, True)
        fresh.this.disown()  # the index frees it
        self._index.reset()

    def keep(self, truth: Truth) -> None:
        """Have what the index holds written as the next part, and empty the index.

        Args:
            truth: after that part.

        Raises:
            OSError: this, or the part before, cannot be written.
        """
        self.wait()
        number = len(self.finished)
        self._parts.keep_truth(number + 1, truth)
        self._filled, self._written = self._written, self._filled
        self._writing = self._pool.submit(self._parts.keep, number, self._written, self._index.ntotal)
        self._filled.reset()
        self._ivf.replace_invlists(self._filled, False)
        self._index.reset()

    def wait(self) -> None:
        """Until all that was given is on the disk."""
        if self._writing is not None:
            self.finished.append(self._writing.result())
            self._writing = None

    def _lists(self) -> Any:
        return load_faiss().ArrayInvertedLists(self._ivf.nlist, self._ivf.code_size)
