"""The output, a folder or a prefix on an object store: where things are put so that a reader never sees half of one.

In a folder a file is written under a hidden temporary name beside its target, flushed to the disk, and renamed; a
folder entry is flushed after the rename. Whatever carries the temporary suffix is left over from a crash and never
counts. How an object store does it stands in ``object_store.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError, one_line
from pipeline.remote import is_remote

TEMPORARY_SUFFIX = ".tmp"


class Storage(Protocol):
    """What a run, an index and a search need of the place where the output is; names are relative to ``root``."""

    @property
    def root(self) -> str | Path: ...
    def prepare(self) -> list[str]:
        """Prove that it can be written; returns what a person should know of it."""
        ...

    def location(self, name: str) -> str:
        """For messages."""
        ...

    def temporary(self, name: str) -> Path:
        """A fresh path on this machine to build ``name`` at, in a folder that exists."""
        ...

    def publish(self, temporary: Path, name: str) -> None:
        """Make a finished file appear as ``name``, whole and durably, replacing what was there."""
        ...

    def write_json(self, name: str, document: Any) -> None: ...
    def create_json(self, name: str, document: Any) -> bool:
        """Write what nobody else has written; False where somebody has, whose document stays."""
        ...

    def read_json(self, name: str) -> Any | None:
        """The document, or None when it is missing or was cut: both mean 'not finished'."""
        ...

    def size(self, name: str) -> int | None:
        """In bytes; None when there is no such file."""
        ...

    def files(self, folder: str, suffix: str, *, hidden: bool = False) -> Iterator[str]:
        """Names below ``folder`` that end in ``suffix``, in no particular order."""
        ...

    def remove(self, name: str) -> None:
        """Remove what may be there."""
        ...

    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all files below it."""
        ...

    def source(self, name: str) -> Any:
        """What ``pyarrow.parquet.ParquetFile`` opens to read parts of a file."""
        ...

    def fetch(self, name: str) -> Path:
        """The whole file on this machine, for those who can only read a path."""
        ...

    def release(self, name: str) -> None:
        """What was fetched is not needed any more."""
        ...

    def sweep(self) -> int:
        """Remove what a crash left; returns how many. Only safe while holding the lock."""
        ...

    def lock(self, *, shared: bool = False, name: str = ".lock") -> contextlib.AbstractContextManager[bool]:
        """Hold the output for one coordinator, or for one of several ranks; yields False when another one has it."""
        ...


def open_output(output: str | os.PathLike[str]) -> Storage:
    """The place that ``--output`` names: a folder, or a URL such as ``s3://bucket/prefix``.

    Raises:
        ConfigError: the URL's protocol is unknown or needs a package that is not installed.
    """
    name = os.fspath(output)
    if not is_remote(name):
        return Output(name.removeprefix("file://"))
    from pipeline.object_store import ObjectStore

    return ObjectStore(name)


class Output:
    """The folder given as ``--output``; every name is relative to it, with ``/`` between parts."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))

    def path(self, name: str) -> Path:
        return self.root / name

    source = fetch = path

    def location(self, name: str) -> str:
        return str(self.path(name))

    def release(self, name: str) -> None:
        """Nothing was copied."""

    def prepare(self) -> list[str]:
        """Create the folder and prove that it can be written.

        Raises:
            ConfigError: it cannot.
        """
        probe = self.root / f".writable-{os.getpid()}{TEMPORARY_SUFFIX}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--output {self.root}: cannot be written ({error.strerror}); expected a folder of yours"
            ) from None
        return []

    def temporary(self, name: str) -> Path:
        """A fresh path beside ``name``, in a folder that exists; hidden, and marked as unfinished."""
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not by process number alone: two containers that share the folder may have the same.
        return target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"

    def publish(self, temporary: Path, name: str) -> None:
        """Make a finished temporary file appear as ``name``, replacing what was there, durably."""
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        target = self.path(name)
        os.replace(temporary, target)
        _sync_folder(target.parent)

    def write_json(self, name: str, document: Any) -> None:
        temporary = self.temporary(name)
        try:
            temporary.write_bytes(json_bytes(document))
            self.publish(temporary, name)
        finally:
            temporary.unlink(missing_ok=True)

    def create_json(self, name: str, document: Any) -> bool:
        """A link appears whole or not at all, and never in another's place: of two ranks exactly one has it."""
        temporary, target = self.temporary(name), self.path(name)
        try:
            temporary.write_bytes(json_bytes(document))
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError:  # a file system without links; the lock keeps whole runs apart there
                os.replace(temporary, target)
            _sync_folder(target.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def read_json(self, name: str) -> Any | None:
        """The document, or None when it is missing or was cut: both mean 'not finished'."""
        try:
            return json.loads(self.path(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def size(self, name: str) -> int | None:
        try:
            return self.path(name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def files(self, folder: str, suffix: str, *, hidden: bool = False) -> Iterator[str]:
        """Names below ``folder`` that end in ``suffix``, in no particular order; hidden ones only where asked for."""
        top = self.path(folder)
        for path in top.rglob(f"*{suffix}"):
            shown = hidden or not any(part.startswith(".") for part in path.relative_to(top).parts)
            if shown and path.is_file():
                yield path.relative_to(self.root).as_posix()

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def remove_tree(self, folder: str) -> None:
        shutil.rmtree(self.path(folder), ignore_errors=True)
        for above in Path(folder).parents[:-1]:  # folders that only it was in
            with contextlib.suppress(OSError):
                self.path(str(above)).rmdir()

    def sweep(self) -> int:
        """Remove temporary files that a crash left; returns how many. Only safe while holding the output's lock."""
        left = [path for path in self.root.rglob(f".*{TEMPORARY_SUFFIX}") if path.is_file()]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, name: str = ".lock") -> Iterator[bool]:
        """Hold the output for one coordinator; yields False when another one has it.

        Ranks hold it together, and keep out whoever works without a rank. The kernel releases the lock when its holder
        dies, however it dies.
        """
        import fcntl

        with open(self.root / name, "a", encoding="ascii") as file:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


@contextlib.contextmanager
def reading(store: Storage, name: str, failure: Callable[[str], Exception]) -> Iterator[pq.ParquetFile]:
    """A Parquet file of the output, checksums checked; as one file: as a dataset, a folder named key=value in its path
    would become a column.

    Args:
        store, name: where it is.
        failure: makes the error of a message that says what could not be read and why.
    """
    try:
        with pq.ParquetFile(store.source(name), page_checksum_verification=True, pre_buffer=False) as parquet:
            yield parquet
    except (OSError, KeyError, pa.ArrowException) as error:
        raise failure(f"{store.location(name)}: cannot be read ({one_line(error)})") from error


def json_bytes(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def sha256_file(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(store: Storage, name: str) -> str:
    """Of the bytes that are there now."""
    try:
        return sha256_file(store.fetch(name))
    finally:
        store.release(name)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
