"""One JSON line on stderr for each request and each event of the server. Texts, vectors and keys are not in it.

Lines are written together, a few times a second and in another thread, so that a slow reader of stderr holds up no
request. What a reader does not take in time is dropped and counted, in a line of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

EVERY_S = 0.2
MAX_LINES = 10_000


class AccessLog:
    """Use `start` and `stop`; before and between them nothing is written.

    Args:
        requests: whether requests have lines; events always have.
        stream: where to; stderr where nothing is given.
    """

    def __init__(self, *, requests: bool = True, stream: TextIO | None = None) -> None:
        self._requests, self._stream = requests, stream or sys.stderr
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._writer: asyncio.Task[None] | None = None

    def request(self, **values: Any) -> None:
        if self._requests:
            self._add("info", "request", values)

    def event(self, event: str, level: str = "info", **values: Any) -> None:
        self._add(level, event, values)

    def _add(self, level: str, event: str, values: dict[str, Any]) -> None:
        if len(self._lines) >= MAX_LINES:
            self._dropped += 1
            return
        known = {name: value for name, value in values.items() if value is not None}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._lines.append(orjson.dumps({"time": time, "level": level, "event": event, **known}, default=str))

    def start(self) -> None:
        self._writer = asyncio.create_task(self._write_on())

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if self._lines:
                await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Write what is there."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if self._dropped:
            lines.append(orjson.dumps({"level": "warning", "event": "log_dropped", "lines": self._dropped}))
            self._dropped = 0
        with contextlib.suppress(OSError, ValueError):  # nobody reads; the server goes on
            self._stream.write("".join(f"{line.decode()}\n" for line in lines))
            self._stream.flush()

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
        self.flush()
