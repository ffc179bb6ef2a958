"""Folders for files that are on their way to or from an object store; below ``TMPDIR``, removed with their owner.

Each holds a locked file while its owner lives. The kernel releases the lock however the owner dies, so what a crash
left is told from what is in use, also by another container that shares the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

PREFIX = "embed-corpus-"
LOCK = ".lock"


def new_folder(owner: Any) -> Path:
    """An empty folder that is removed when ``owner`` is collected or the interpreter ends."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Renamed once it is locked: nobody ever finds it unlocked while its owner lives.
    descriptor = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(folder / f"{LOCK}.new", folder / LOCK)
    weakref.finalize(owner, _remove, folder, descriptor)
    return folder


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def sweep() -> int:
    """Remove the folders whose owners are dead; returns how many."""
    return sum(_swept(folder) for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def _swept(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # another user's, in use, or gone by now
        descriptor = os.open(folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            return True
        finally:
            os.close(descriptor)
    return False
