"""One child process, timed from its start to its end, with the memory that it and all its descendants held.

Memory is the resident size of the whole process tree, added up ten times a second from ``/proc``; pages that processes
share (libraries) count once for each. Where there is no ``/proc`` it is None.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, DataError, EmbedCorpusError, Stopped

SAMPLE_EVERY_S = 0.1
GRACE_S = 10.0


@dataclass(frozen=True)
class Timed:
    """What a finished process took.

    Attributes:
        wall_s: from its start to its end.
        answer: the JSON it wrote to stdout.
        peak_bytes: largest resident size of its tree, or None.
    """

    wall_s: float
    answer: dict[str, Any]
    peak_bytes: int | None


def timed(what: str, command: Sequence[str], environment: dict[str, str]) -> Timed:
    """Run ``command`` to its end. It answers with JSON on stdout, and with one line on stderr where it fails.

    Args:
        what: begins the message of a failure.
        command: program and arguments.
        environment: of the child.

    Raises:
        EmbedCorpusError: the child failed; of the kind its exit code stands for.
    """
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends this child
    ) as process:
        memory = _TreeMemory(process.pid)
        try:
            answer, complaint = process.communicate()
        except BaseException:
            _end(process)
            raise
        finally:
            peak = memory.stop()
    wall_s = time.perf_counter() - start
    if process.returncode:
        raise _failure(what, process.returncode, complaint)
    return Timed(wall_s, json.loads(answer), peak)


def _failure(what: str, code: int, complaint: str) -> EmbedCorpusError:
    last = next((line.strip() for line in reversed(complaint.splitlines()) if line.strip()), "no message")
    kinds = {kind.exit_code: kind for kind in (ConfigError, DataError, Stopped)}
    if code < 0:
        return Stopped(f"{what}: its process was ended by signal {-code} ({last})")
    return kinds.get(code, EmbedCorpusError)(f"{what}: {last.removeprefix('embed-corpus: ')}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # a run ends its own workers then
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


class _TreeMemory:
    """Watches the resident size of a process and its descendants in a thread."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak = pid, 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memory")
        self._thread.start()

    def stop(self) -> int | None:
        self._stopped.set()
        self._thread.join()
        return self._peak or None

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_EVERY_S):
            self._peak = max(self._peak, tree_bytes(self._pid))


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and all its descendants now; 0 where that cannot be read."""
    folder = Path("/proc") / str(pid)
    try:
        pages = int((folder / "statm").read_text().split()[1])
        tasks = os.listdir(folder / "task")
    except (OSError, IndexError, ValueError):  # it has just ended
        return 0
    total = pages * os.sysconf("SC_PAGE_SIZE")
    for task in tasks:
        try:
            children = (folder / "task" / task / "children").read_text().split()
        except OSError:
            continue
        total += sum(tree_bytes(int(child)) for child in children)
    return total
