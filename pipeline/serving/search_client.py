"""Vectors -> hits, from the search process: started, asked, watched, and started again when it dies.

The process that serves loads neither faiss nor pyarrow for this.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.pool import _visible, child_environment
from pipeline.serving import frames
from pipeline.serving.device_ring import InRing
from pipeline.serving.errors import DeadlineExceeded, Overloaded, ServingError
from pipeline.threads import available_cores

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0  # before the process is started again
STDERR_LINES = 40


class SearchDown(ServingError):
    """The search process died, or has no index to search (503)."""

    reason = "search_down"


class NotSearchable(ServingError):
    """What is asked for does not fit the index: k, columns, filter or the vectors' length (422)."""

    reason = "not_searchable"


@dataclass(frozen=True)
class Hits:
    """The answer to a search.

    Attributes:
        json: a list of hits a query, as JSON; a hit is an object as `embed-corpus search --json` prints it.
        generation: of the index that was searched.
        seconds: spent in the search process.
        warnings: what a person should know of these hits.
    """

    json: bytes
    generation: str
    seconds: float
    warnings: tuple[str, ...]


class SearchClient:
    """Use `start`, `search`, `close`.

    Args:
        output: folder or URL.
        fingerprint: of the vectors that are searched with; an index of another one is not searched.
        poll_s: how often the process looks for a new generation.
        cache_bytes: what it may keep of ids and columns.
        max_waiting: searches at once; one more is refused.
        ring_device: ``cuda:N`` where vectors are handed over in a ring on it (`device_ring`); None sends their bytes.
        say: hears of a new generation and of trouble: an event's name and its values.
    """

    def __init__(
        self,
        output: str,
        fingerprint: str,
        *,
        poll_s: float,
        cache_bytes: int,
        max_waiting: int,
        say: Callable[..., None],
        ring_device: str | None = None,
    ) -> None:
        self._command = [sys.executable, "-m", "pipeline.serving.search_process", output]
        self._command += ["--poll-s", str(poll_s), "--cache-bytes", str(cache_bytes)]
        self._command += ["--rings"] if ring_device is not None else []
        self._fingerprint, self._max_waiting, self._say = fingerprint, max_waiting, say
        self._ring_device = ring_device
        self._told_ring = self._lost_ring = ""
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._number = 0
        self._rate_s = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._keeper: asyncio.Task[None] | None = None
        self._told = asyncio.Event()
        self._closed = False
        self.index: dict[str, Any] | None = None
        """What is known of the generation that is searched; None while there is none."""
        self.trouble = "the index is still being opened"
        self.restarts = 0
        self.by_ring = self.ring_gone = 0
        """Searches whose vectors came out of a ring, and those for which they were not there any more."""

    async def start(self) -> None:
        """Start the process, and wait until it has opened the index or said why it cannot."""
        self._keeper = asyncio.create_task(self._keep())
        await self._told.wait()

    async def search(
        self,
        vectors: NDArray[np.float32],
        *,
        k: int,
        columns: Sequence[str] | None,
        where: str | None = None,
        deadline: float,
        in_ring: InRing | None = None,
    ) -> Hits:
        """The ``k`` nearest rows of each query.

        Args:
            vectors: (n, dim) float32.
            k: hits a query.
            columns: carried columns to bring; None brings all.
            where: which rows may be found, see `pipeline.filters`.
            deadline: on the loop's clock.
            in_ring: where these vectors are on the device, too; they are taken from there while they are.

        Raises:
            NotSearchable, SearchDown, Overloaded, DeadlineExceeded.
        """
        self._check_index()
        if len(self._waiting) >= self._max_waiting:
            wait_s = max(0.1, self._rate_s * len(self._waiting))
            raise Overloaded(wait_s, f"{len(self._waiting)} searches are waiting")
        request: dict[str, Any] = {"deadline": deadline, "n": len(vectors), "k": k, "columns": columns, "where": where}
        if in_ring is not None and self._ring_device is not None and in_ring.ring.name != self._lost_ring:
            answer, found = await self._ask({**request, **self._in(in_ring)}, in_ring.numbers.tobytes(), deadline)
            if answer["event"] != "gone":
                self.by_ring += 1
                return self._hits(answer, found)
            self._gone(in_ring, answer)
            self._check_index()  # another process may be needed now
        answer, found = await self._ask(request, np.ascontiguousarray(vectors, dtype=np.float32).tobytes(), deadline)
        return self._hits(answer, found)

    async def _ask(self, request: dict[str, Any], data: bytes, deadline: float) -> tuple[dict[str, Any], bytes]:
        assert self._process is not None and self._process.stdin is not None
        self._number += 1
        number = self._number
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout_at(deadline):
                self._process.stdin.write(frames.pack({"id": number, **request}, data))
                await self._process.stdin.drain()
                return await future
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the index was searched") from None
        except (ConnectionError, RuntimeError):  # the pipe is closed: it died a moment ago
            raise SearchDown("the search process died; try again") from None
        finally:
            self._waiting.pop(number, None)

    def _in(self, in_ring: InRing) -> dict[str, Any]:
        """The ring's name, and once how to open it: requests are answered in the order they are sent."""
        ring = in_ring.ring
        opens = {"open": asdict(ring)} if ring.name != self._told_ring else {}
        self._told_ring = ring.name
        return {"ring": ring.name, **opens}

    def _gone(self, in_ring: InRing, answer: dict[str, Any]) -> None:
        self.ring_gone += 1
        if answer["for_good"] and self._lost_ring != in_ring.ring.name:
            self._lost_ring = in_ring.ring.name
            self._say("ring_lost", message=answer["message"])

    def _hits(self, answer: dict[str, Any], found: bytes) -> Hits:
        match answer["event"]:
            case "hits":
                seconds = answer["seconds"]
                self._rate_s = 0.9 * self._rate_s + 0.1 * seconds if self._rate_s else seconds
                return Hits(found, answer["generation"], seconds, tuple(answer["warnings"]))
            case "refused":
                raise NotSearchable(answer["message"])
            case "expired":
                raise DeadlineExceeded("the deadline passed before the index was searched")
            case "none":
                raise SearchDown(answer["message"] or self.trouble)
        self._say("search_failed", message=answer["message"], trace=answer["trace"])
        raise RuntimeError(f"search process: {answer['message']}")

    def _check_index(self) -> None:
        if self.index is None or self._process is None:
            raise SearchDown(self.trouble)
        if self.index["fingerprint"] != self._fingerprint:
            raise SearchDown(
                f"the index holds vectors with fingerprint {self.index['fingerprint']}, this server makes "
                f"{self._fingerprint}; start it again"
            )

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed:
            await self._run_once()
            if self._closed:
                return
            self.restarts += 1
            pause_s = FIRST_PAUSE_S if self.index is not None else min(2 * pause_s, LONGEST_PAUSE_S)
            last = next((line for line in reversed(self._stderr) if line.strip()), "")
            self.index, self.trouble = None, "the search process died and is started again"
            self._say("search_died", message=last)
            self._told.set()
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> None:
        threads = max(1, available_cores() // 2)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # FAISS' threads would spin between two searches, on cores that the encoder needs.
            # It sees a GPU, the encoder's as the first one, only where vectors come from there.
            env={**child_environment(threads), **_visible(self._ring_device or "cpu"), "OMP_WAIT_POLICY": "PASSIVE"},
            start_new_session=True,
        )
        self._told_ring = ""
        assert self._process.stdout is not None and self._process.stderr is not None
        errors = asyncio.create_task(self._read_errors(self._process.stderr))
        try:
            while (message := await frames.read_from(self._process.stdout)) is not None:
                self._receive(*message)
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
            await errors
            self._process = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(SearchDown("the search process died; try again"))

    def _receive(self, answer: dict[str, Any], data: bytes) -> None:
        event = answer["event"]
        if event == "index":
            self.index = {name: value for name, value in answer.items() if name != "event"}
            self.trouble = ""
            self._say("index", generation=answer["generation"], vectors=answer["ntotal"], factory=answer["factory"])
            self._told.set()
        elif event == "trouble":
            if self.index is None:
                self.trouble = answer["message"]
            self._say("index_trouble", message=answer["message"])
            self._told.set()
        else:
            future = self._waiting.get(answer["id"])
            if future is not None and not future.done():
                future.set_result((answer, data))

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self._stderr.append(line.decode(errors="replace").rstrip())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.close()  # it leaves when its requests end
        if self._keeper is not None:
            await asyncio.wait([self._keeper], timeout=5)
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
