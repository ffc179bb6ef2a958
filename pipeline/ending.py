"""How the last runs of an output ended: ``runs/<rank>.json``, written when a run begins and again when it ends.

Nothing rests on it but what ``report`` says: a job that has stopped is told from one that is slow, and why it stopped
can be read from any machine. A run that was killed leaves the note of its beginning.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from pipeline.errors import EXIT_BUG, EXIT_DATA, EXIT_OK, EXIT_STOPPED, EmbedCorpusError, one_line
from pipeline.ranks import Rank
from pipeline.storage import Storage
from pipeline.telemetry import RunReport

FOLDER = "runs"
VERSION = 1
MAX_FAILURES = 100
OUTCOMES = {EXIT_OK: "done", EXIT_DATA: "bad data", EXIT_STOPPED: "stopped"}


class Ending:
    """What is known of a run that is to end.

    Attributes:
        report: once there is one.
    """

    report: RunReport | None = None


@contextlib.contextmanager
def noted(output: Storage, rank: Rank | None) -> Iterator[Ending]:
    """Notes that a run began, and how it ended; to be entered while holding the output's lock.

    It replaces the notes of runs that were shared out in another way.
    """
    name = f"{FOLDER}/{f'rank-{rank.number}-of-{rank.of}' if rank else 'all'}.json"
    document: dict[str, Any] = {"version": VERSION, "rank": str(rank or ""), "num_ranks": rank.of if rank else 1}
    document |= {"host": socket.gethostname(), "pid": os.getpid(), "began": _now(), "ended": None}
    _quietly(lambda: _begin(output, name, document))
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        failed = _of_error(error)
        _quietly(lambda: output.write_json(name, document | failed | _of_report(ending.report)))
        raise
    assert ending.report is not None
    end = _of_end(ending.report.exit_code, ending.report.stopped) | _of_report(ending.report)
    _quietly(lambda: output.write_json(name, document | end))


def _begin(output: Storage, name: str, document: dict[str, Any]) -> None:
    for other in list(output.files(FOLDER, ".json")):
        if other.rpartition("-")[2] != name.rpartition("-")[2]:
            output.remove(other)
    output.write_json(name, document)


def _of_error(error: BaseException) -> dict[str, Any]:
    if isinstance(error, EmbedCorpusError):
        return _of_end(error.exit_code, one_line(error))
    if isinstance(error, KeyboardInterrupt):
        return _of_end(EXIT_STOPPED, "asked to stop by a signal")
    return _of_end(EXIT_BUG, f"{type(error).__name__}: {one_line(error)}")


def _of_end(exit_code: int, reason: str) -> dict[str, Any]:
    return {"ended": _now(), "exit_code": exit_code, "outcome": OUTCOMES.get(exit_code, "failed"), "reason": reason}


def _of_report(report: RunReport | None) -> dict[str, Any]:
    failed = [] if report is None else report.failed
    return {
        "shards_done": 0 if report is None else report.shards_done,
        "retries": 0 if report is None else report.retries,
        "num_failed": len(failed),
        # A reason may bring a traceback; the log has that.
        "failed": [
            {"shard": one.shard, "kind": one.kind, "reason": one.reason.partition("\n")[0]}
            for one in failed[:MAX_FAILURES]
        ],
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _quietly(write: Callable[[], None]) -> None:
    """A note that cannot be written ends no run: the disk may be full, which is what the note was to say."""
    with contextlib.suppress(OSError, EmbedCorpusError):
        write()
