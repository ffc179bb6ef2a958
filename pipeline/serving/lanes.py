"""The processes that compute, as the server sees them: started, sent batches, watched, replaced when they die.

Everything here runs on the event loop of the server. A `Lane` is one encoder process after another with the same setup:
when one dies, its batches end in `EngineDown`, and the next one is started, or steps in where a spare one is kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import json
import logging
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EXIT_CONFIG, ConfigError, one_line
from pipeline.pool import _visible, child_environment
from pipeline.serving.device_ring import InRing, Ring
from pipeline.serving.errors import EngineDown
from pipeline.tokenizer_process import _write as write_frame

logger = logging.getLogger(__name__)

STALL_S = 60.0  # a batch takes less even for large models on a CPU; a process that takes longer is replaced
STDERR_LINES = 40
READ_BYTES = 1 << 22
MAX_PAUSE_S = 10.0


class Computed(NamedTuple):
    """What comes back of a batch of n texts.

    Attributes:
        vectors: (n, dim) float32.
        seconds: the process spent on them.
        in_ring: where they are on the device, too; None where there is no ring.
    """

    vectors: NDArray[np.float32]
    seconds: float
    in_ring: InRing | None = None


class Lane(Protocol):
    """What the engine needs of something that computes.

    Attributes:
        name: ``onnx``, ``onnx-int8`` or ``torch``.
        restarts: how often it was replaced.
        batches: how many it was sent.
        last_words: why there is no process, after the last one died or could not be started.
        on_change: called when it became ready, or stopped being so.
    """

    name: str
    restarts: int
    batches: int
    last_words: str
    on_change: Callable[[], None]

    @property
    def is_ready(self) -> bool: ...
    def predicted_s(self, lengths: NDArray[np.int32]) -> float:
        """Seconds a batch of such texts takes; only for comparing lanes."""
        ...

    def send(
        self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int
    ) -> asyncio.Future[Computed]:
        """Have a batch computed, texts longest first; fails with `EngineDown` when the process dies."""
        ...

    async def close(self) -> None: ...


class EncoderChild:
    """One ``pipeline.serving.encoder_process``.

    Attributes:
        ready: its facts once it has loaded; ConfigError or EngineDown when it could not.
        ended: why, once it is gone.
    """

    def __init__(self, process: asyncio.subprocess.Process, setup: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        assert process.stdin is not None
        self._requests = process.stdin
        self.ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._pending: collections.deque[tuple[asyncio.Future[Computed], float, int]] = collections.deque()
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._ring: Ring | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_stderr())]
        self._write({**setup}, [])

    @classmethod
    async def start(cls, setup: dict[str, Any], device: str, threads: int) -> EncoderChild:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipeline.serving.encoder_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**child_environment(threads), **_visible(device)},
            start_new_session=True,  # Ctrl-C reaches the server alone
            limit=READ_BYTES,
        )
        return cls(process, setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(
        self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int
    ) -> asyncio.Future[Computed]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Computed] = loop.create_future()
        self._pending.append((future, loop.time(), len(lengths)))
        self._write({"do": "batch", "prompt_length": prompt_length}, [input_ids, lengths])
        return future

    def oldest_s(self, now: float) -> float:
        """How long the batch that it computes has been there."""
        return now - self._pending[0][1] if self._pending else 0.0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End it, whatever it is doing, and wait for that."""
        self._requests.close()
        self.kill()
        await self._process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _write(self, header: dict[str, Any], arrays: list[NDArray[np.int32]]) -> None:
        frame = io.BytesIO()
        write_frame(frame, header, arrays)
        # Not drained: at most two batches are ever on their way, and a dead process is noticed where it is read.
        with contextlib.suppress(OSError, RuntimeError):
            self._requests.write(frame.getvalue())

    async def _read(self) -> None:
        answers = self._process.stdout
        assert answers is not None
        try:
            while True:
                [num_bytes] = struct.unpack("<I", await answers.readexactly(4))
                header = json.loads(await answers.readexactly(num_bytes))
                arrays = [
                    np.frombuffer(await answers.readexactly(np.dtype(dtype).itemsize * length), dtype)
                    for dtype, length in header.pop("arrays")
                ]
                self._take(header, arrays)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        code = await self._process.wait()
        await asyncio.wait([self._tasks[1]], timeout=1)
        self._end(code)

    def _take(self, header: dict[str, Any], arrays: list[NDArray[Any]]) -> None:
        if not self.ready.done():
            if header["event"] == "ready":
                if "ring" in header:
                    self._ring = Ring(**header["ring"])
                self.ready.set_result(header)
            else:
                self.ready.set_exception(_start_error(header))
            return
        future, _, num_texts = self._pending.popleft()
        if future.done():
            return
        if header["event"] == "error":
            future.set_exception(EngineDown(f"a batch could not be computed: {header['message']}"))
        else:
            vectors = arrays[0].reshape(num_texts, -1)
            in_ring = None if self._ring is None else InRing(self._ring, arrays[1])
            future.set_result(Computed(vectors, float(header["seconds"]), in_ring))

    def _end(self, code: int) -> None:
        cause = f"the encoder process {self._cause(code)}"
        self.ended.set_result(cause)  # first: whoever learns of a failed batch must see that there is no process
        if not self.ready.done():
            self.ready.set_exception(EngineDown(f"{cause} while it loaded the model"))
        for future, _, _ in self._pending:
            if not future.done():
                future.set_exception(EngineDown(f"{cause}; try again"))
        self._pending.clear()
        self.ready.exception()  # read here, so that asyncio does not warn where nobody waits for it

    def _cause(self, code: int) -> str:
        if code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        last = next((line for line in reversed(self._stderr) if line), "")
        return f"ended with exit code {code}" + (f": {last}" if last else "")

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # a line longer than the buffer
            async for line in self._process.stderr:
                self._stderr.append(line.decode("utf-8", "replace").strip())


def _start_error(header: dict[str, Any]) -> Exception:
    if header["exit_code"] == EXIT_CONFIG:
        return ConfigError(header["message"])
    return EngineDown(f"the encoder process could not load the model: {header['message']}\n{header['trace']}")


class ProcessLane:
    """A lane that is one process at a time.

    Args:
        name: see `Lane`.
        setup: first message to each process.
        device: ``cpu`` or ``cuda:N``.
        threads: cores it may use.
        cost: seconds of each of ``calibration.cost_terms``; zeros where it is not known.
        spare: keep a second process that has loaded the model and steps in at once.
    """

    def __init__(
        self,
        name: str,
        setup: dict[str, Any],
        device: str,
        threads: int,
        *,
        cost: tuple[float, float, float] = (0.0, 0.0, 0.0),
        spare: bool = False,
    ) -> None:
        self.name, self.restarts, self.batches = name, 0, 0
        self.last_words = ""
        self.on_change: Callable[[], None] = lambda: None
        self.facts: dict[str, Any] = {}
        self._setup, self._device, self._threads = setup, device, threads
        self._cost, self._keeps_spare = cost, spare
        self._child: EncoderChild | None = None
        self._spare: asyncio.Task[EncoderChild] | None = None
        self._all: set[EncoderChild] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the first process and wait until it has loaded.

        Raises:
            ConfigError: the model cannot be loaded as asked, or a graph's vectors are not the batch engine's.
            EngineDown: the process died.
        """
        self._child = await self._loaded()
        self.facts = await self._child.ready
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]

    @property
    def is_ready(self) -> bool:
        return self._child is not None and not self._child.ended.done()

    @property
    def pid(self) -> int | None:
        """Of the process that computes now."""
        return None if self._child is None else self._child.pid

    def predicted_s(self, lengths: NDArray[np.int32]) -> float:
        tokens, pairs, batch = self._cost
        wide = lengths.astype(np.float64)
        return float(tokens * wide.sum() + pairs * (wide**2).sum() + batch)

    def send(
        self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int
    ) -> asyncio.Future[Computed]:
        assert self._child is not None, "a batch for a lane without a process. This is a bug."
        self.batches += 1
        return self._child.send(input_ids, lengths, prompt_length)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._spare is not None:
            self._spare.cancel()
        await asyncio.gather(*self._tasks, *([self._spare] if self._spare else []), return_exceptions=True)
        self._child = None
        await asyncio.gather(*(child.close() for child in list(self._all)))

    async def _loaded(self) -> EncoderChild:
        child = await EncoderChild.start(self._setup, self._device, self._threads)
        self._all.add(child)
        try:
            await asyncio.shield(child.ready)
        except BaseException:
            await child.close()
            self._all.discard(child)
            raise
        return child

    async def _supervise(self) -> None:
        failures = 0
        while True:
            if self._keeps_spare and self._spare is None:
                self._spare = asyncio.create_task(self._loaded())
            if self._child is not None:
                self.last_words = await asyncio.shield(self._child.ended)
                logger.warning("%s lane: %s; another one takes its place", self.name, self.last_words)
                dead, self._child = self._child, None
                self.on_change()
                await dead.close()
                self._all.discard(dead)
                self.restarts += 1
            coming, self._spare = self._spare, None
            try:
                # A spare one that died meanwhile, or could not be had, is no loss: another one is started.
                self._child = await (coming or self._loaded())
            except (EngineDown, ConfigError, OSError) as error:
                failures += 1
                self.last_words = one_line(error)
                logger.warning("%s lane: %s; trying again", self.name, self.last_words)
                await asyncio.sleep(min(MAX_PAUSE_S, 0.1 * 2**failures) if coming is None else 0)
                continue
            failures = 0
            self.on_change()

    async def _watch(self) -> None:
        """A process that does not come back from a batch is killed, and so replaced."""
        while True:
            await asyncio.sleep(1)
            if self._child is not None and self._child.oldest_s(asyncio.get_running_loop().time()) > STALL_S:
                self._child.kill()
