"""The output folder: where things are put so that a reader never sees half of one.

A file is written under a hidden temporary name beside its target, flushed to the disk, and renamed; a folder entry is
flushed after the rename. Whatever carries the temporary suffix is left over from a crash and never counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

TEMPORARY_SUFFIX = ".tmp"


class Output:
    """The folder given as ``--output``; every name is relative to it, with ``/`` between parts."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))

    def path(self, name: str) -> Path:
        return self.root / name

    def prepare(self) -> None:
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

    def temporary(self, name: str) -> Path:
        """A fresh path beside ``name``, in a folder that exists; hidden, and marked as unfinished."""
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.parent / f".{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}"

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
            temporary.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            self.publish(temporary, name)
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

    def files(self, folder: str, suffix: str) -> Iterator[str]:
        """Names below ``folder`` that end in ``suffix``, hidden ones left out, in no particular order."""
        top = self.path(folder)
        for path in top.rglob(f"*{suffix}"):
            if not any(part.startswith(".") for part in path.relative_to(top).parts) and path.is_file():
                yield path.relative_to(self.root).as_posix()

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove temporary files that a crash left; returns how many. Only safe while holding the output's lock."""
        left = [path for path in self.root.rglob(f".*{TEMPORARY_SUFFIX}") if path.is_file()]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the output for one coordinator; yields False when another one has it.

        The kernel releases the lock when its holder dies, however it dies.
        """
        import fcntl

        with open(self.root / ".lock", "a", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def sha256_file(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
