"""Worker processes, one a device: started, fed shard by shard, watched, replaced when they die.

Workers are plain child processes with a pipe each way, in a session of their own. No fork, no ``multiprocessing``: it
works from a notebook, a script without a main guard, or another tool's task. The coordinator never imports torch.
How a worker is started and watched on other machines stands in ``ray_pool.py``; who gets what is decided here for both.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import EXIT_BUG, EXIT_CONFIG, ConfigError, OutputError, Stopped
from pipeline.records import Shard
from pipeline.worker_settings import WorkerSettings

MAX_ATTEMPTS = 3  # a shard is given out so often before it is named and given up
MAX_NODES_LOST = 10  # where the whole machine went: seldom the shard's fault, but one that kills machines must end
STALL_S = 900.0  # without any sign of progress; one batch takes seconds even for large models on a CPU
STDERR_LINES = 40


@dataclass(frozen=True)
class Event:
    """What happened to a shard or a worker.

    Attributes:
        kind: see the values; ``part`` is a finished part of a large shard, which itself is ``done`` later; ``tick``
            comes about once a second when nothing else happens.
        shard: which one, or which part of one, where it is about one.
        values: the worker's message.
        reason: for ``bad``, ``lost``, ``gave up`` and ``bug``, in words.
    """

    kind: Literal["tick", "ready", "progress", "part", "done", "bad", "lost", "gave up", "bug"]
    shard: Shard | None = None
    values: dict[str, Any] | None = None
    reason: str = ""


class PoolWorker(ABC):
    """What the pool knows of a worker, wherever its process runs.

    Attributes:
        device: what it was started for: ``cpu``, ``cuda`` or ``cuda:N``.
        units: in work, the oldest first.
        ready: its model is loaded.
        last_sign: when it was last heard of or given something, in seconds of ``time.monotonic``.
        died_with_node: it ended because its machine did, not by what it was doing.
    """

    died_with_node = False

    def __init__(self, device: str) -> None:
        self.device, self.last_sign, self.ready = device, time.monotonic(), False
        self.units: dict[str, Shard] = {}

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return self.device

    def start(self, unit: Shard) -> None:
        self.units[unit.unit], self.last_sign = unit, time.monotonic()
        self.send(do="shard", shard=asdict(unit))

    @abstractmethod
    def send(self, **request: Any) -> None:
        """Send a request; one that is lost with the worker is no error: the worker's end arrives as an event."""

    @abstractmethod
    def kill(self) -> None:
        """End it now; its end arrives as an event."""

    @abstractmethod
    def close(self) -> None:
        """End it, whatever it is doing."""

    @abstractmethod
    def cause_of_death(self) -> str: ...


Events = queue.Queue[tuple[PoolWorker, Any]]


class WorkerProcess(PoolWorker):
    """One child process.

    Args:
        device: ``cpu`` or ``cuda:N``; the child sees only that GPU, as ``cuda:0``.
        settings: sent as the first message.
        threads: cores it may use.
        events: receives (worker, message) for each answer and (worker, None) when it ended.
    """

    def __init__(self, device: str, settings: WorkerSettings, threads: int, events: Events) -> None:
        super().__init__(device)
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**child_environment(threads, offline=settings.offline), **_visible(device)},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the coordinator alone, which then ends its workers
        )
        self._drain = threading.Thread(target=self._read_stderr, daemon=True)
        self._drain.start()
        self._answers = threading.Thread(target=self._read_answers, args=(events,), daemon=True)
        self._answers.start()
        visible = "cuda:0" if device.startswith("cuda") else device
        encoder = replace(settings.encoder, device=visible)
        self.send(do="setup", settings=asdict(replace(settings, encoder=encoder)))

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it died; its end is reported by the thread that reads its answers
            pass

    def _read_answers(self, events: Events) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                events.put((self, json.loads(line)))
        self.process.wait()
        self._drain.join(timeout=5)
        events.put((self, None))

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._stderr.append(line.rstrip())

    def cause_of_death(self) -> str:
        code = self.process.poll()
        if code == -signal.SIGKILL:
            return "killed (signal 9; the machine may be out of memory)"
        if code is not None and code < 0:
            return f"ended by signal {-code} ({signal.Signals(-code).name})"
        last = next((line for line in reversed(self._stderr) if line.strip()), "")
        return f"ended with exit code {code}" + (f": {last.strip()}" if last else "")

    def kill(self) -> None:
        self.process.kill()

    def close(self, grace_s: float = 5.0) -> None:
        """End the process, whatever it is doing, and wait for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # what was still to be sent to a dead process
            self.process.stdin.close()  # the worker leaves when its requests end
        try:
            self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.join()
        self._drain.join()


class Pool:
    """One worker a device. Use as a context manager; leaving it leaves no process behind."""

    def __init__(self, devices: Sequence[str], settings: WorkerSettings, cores: int) -> None:
        self._devices, self._settings = list(devices), settings
        self._threads = max(1, cores // max(1, len(devices)))
        self._events: Events = queue.Queue()
        self._workers: list[PoolWorker] = []
        self._failed_starts = 0
        self._later: list[str] = []
        self._todo = _Queue([])

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        # All at once: one that is busy takes seconds to be ended, and a scheduler does not wait long.
        threads = [threading.Thread(target=worker.close) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def process(self, units: Sequence[Shard]) -> Iterator[Event]:
        """Hand the units out, in order, and report what becomes of each.

        A worker gets another one as soon as it has read all of the one before. Every shard ends in exactly one
        ``done``, ``bad``, ``gave up`` or ``bug``; a part that does not end in ``part`` ends its shard.

        Args:
            units: shards, and before each large one its parts that are still to be done.

        Raises:
            ConfigError: the model cannot be loaded as asked.
            OutputError: the output takes no more data.
            Stopped: workers die before they can start.
        """
        self._todo = todo = _Queue(units)
        # The first worker finds out the budget, undisturbed; the others use it, too.
        self._later = self._devices[1 : len(todo)]
        if todo:
            self._spawn(self._devices[0])
        if self._settings.max_batch_tokens:
            self._spawn_later()
        while not (todo.is_done or (todo.is_stopped and not any(worker.units for worker in self._workers))):
            yield from self._next(todo)

    def stop(self) -> None:
        """Hand out nothing more: ``process`` ends when what is in work has ended."""
        self._todo.stop()

    def _start(self, device: str) -> PoolWorker:
        return WorkerProcess(device, self._settings, self._threads, self._events)

    def _spawn(self, device: str) -> None:
        self._workers.append(self._start(device))

    def _spawn_later(self) -> None:
        for device in self._later:
            self._spawn(device)
        self._later = []

    def _next(self, todo: _Queue) -> Iterator[Event]:
        try:
            worker, message = self._events.get(timeout=1.0)
        except queue.Empty:
            self._watch()
            yield Event("tick")
            return
        worker.last_sign = time.monotonic()
        if message is None:
            yield from self._lost(worker, todo)
            return
        kind = message.pop("event")
        unit = worker.units.get(message.get("unit", ""))
        if kind == "progress":
            yield Event("progress", unit, message)
            return
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
            self._settings = replace(self._settings, max_batch_tokens=message["max_batch_tokens"])
            self._spawn_later()
            yield Event("ready", None, message)
        elif kind != "free":
            event = self._end_of(kind, unit, message)
            assert event.shard is not None
            del worker.units[event.shard.unit]
            if todo.ended(event.shard, event.kind):
                yield event
        self._feed(todo, worker)

    def _feed(self, todo: _Queue, *first: PoolWorker) -> None:
        """Give workers that can take it the next unit, and those that had nothing to do what has come up.

        The last units go to whoever is free first, or has loaded the model first: none waits in the hands of a worker
        that is busy.
        """
        idle = [other for other in self._workers if other.ready and not other.units]
        for one in dict.fromkeys([*first, *idle]):
            most = 2 if len(todo) >= len(self._workers) + len(self._later) else 1
            unit = todo.take(beside=list(one.units.values())) if one.ready and len(one.units) < most else None
            if unit is not None:
                one.start(unit)

    def _end_of(self, kind: str, unit: Shard | None, message: dict[str, Any]) -> Event:
        if kind == "done":
            return Event("done" if unit is None or unit.part is None else "part", unit, message["record"])
        if kind == "bad":
            return Event("bad", unit, reason=message["message"])
        if message["exit_code"] == EXIT_CONFIG:
            raise ConfigError(message["message"])
        if message["exit_code"] != EXIT_BUG:
            raise OutputError(message["message"])
        if unit is None:
            raise RuntimeError(f"a worker could not start: {message['trace']}")
        return Event("bug", unit, reason=f"{unit.path}: {message['message']}\n{message['trace']}")

    def _lost(self, worker: PoolWorker, todo: _Queue) -> Iterator[Event]:
        self._workers.remove(worker)
        worker.close()
        cause = f"worker on {worker.place} {worker.cause_of_death()}"
        limit = MAX_NODES_LOST if worker.died_with_node else MAX_ATTEMPTS
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= limit:
                raise Stopped(f"{cause} while loading the model, {self._failed_starts} times; run again to continue")
        if not worker.units:
            yield Event("lost", reason=f"{cause}; starting another")
        for unit in reversed(worker.units.values()):
            attempts = todo.suspect(unit, limit)
            if attempts < limit:
                yield Event("lost", unit, reason=f"{unit.path}: {cause}; trying again")
            elif todo.ended(unit, "gave up"):
                reason = f"{unit.path}: {cause}, {attempts} times at this shard; given up"
                yield Event("gave up", unit, reason=reason)
        self._feed(todo)
        if todo:
            self._spawn(worker.device)

    def _watch(self) -> None:
        """What is done about once a second while nothing happens: end workers that hang."""
        for worker in self._workers:
            if worker.units and time.monotonic() - worker.last_sign > STALL_S:
                worker.kill()


class _Queue:
    """Units that are still to be handed out, and what became of those that were.

    A unit that was in work when a worker died is handed out again, alone: which of two it was that killed the worker
    is then known the next time. A shard that is put together from parts waits for all of them.
    """

    def __init__(self, units: Sequence[Shard]) -> None:
        self._parts = collections.Counter(unit.key for unit in units if unit.part is not None)
        self._joins = {unit.key: unit for unit in units if unit.part is None and self._parts[unit.key]}
        self._waiting = collections.deque(
            unit for unit in units if unit.part is not None or unit.key not in self._joins
        )
        self._attempts: collections.Counter[str] = collections.Counter()
        self._open = {unit.key for unit in units}
        self.is_stopped = False

    def __len__(self) -> int:
        return 0 if self.is_stopped else len(self._waiting)

    def stop(self) -> None:
        self.is_stopped = True

    @property
    def is_done(self) -> bool:
        return not self._open

    def take(self, beside: Sequence[Shard]) -> Shard | None:
        """The next unit for a worker that has others in work; None where there is none that goes with them."""
        if not len(self) or (beside and any(self._attempts[unit.unit] for unit in [*beside, self._waiting[0]])):
            return None
        return self._waiting.popleft()

    def suspect(self, unit: Shard, limit: int) -> int:
        """Note that a worker died with the unit in work; returns how often that was.

        It is taken back to be handed out again while that is less than ``limit``.
        """
        self._attempts[unit.unit] += 1
        if self._attempts[unit.unit] < limit:
            self._waiting.appendleft(unit)
        return self._attempts[unit.unit]

    def ended(self, unit: Shard, kind: str) -> bool:
        """Note what became of a unit; returns whether that is news (a shard fails once, however many parts do)."""
        if unit.key not in self._open:
            return False
        if kind == "part":
            self._parts[unit.key] -= 1
            if not self._parts[unit.key]:
                self._waiting.appendleft(self._joins[unit.key])
            return True
        self._open.discard(unit.key)
        self._waiting = collections.deque(other for other in self._waiting if other.key != unit.key)
        return True


class QueryWorker:
    """A worker that answers single requests, such as queries to embed; started at the first one and kept.

    Attributes:
        ready: what the worker said when the model was loaded; empty before.
    """

    def __init__(self, device: str, settings: WorkerSettings, cores: int) -> None:
        self._device, self._settings, self._cores = device, settings, cores
        self.ready: dict[str, Any] = {}
        self._events: Events = queue.Queue()
        self._worker: WorkerProcess | None = None

    def embed(self, texts: Sequence[str]) -> Any:
        """(n, dim) float32 vectors of the queries, the query prompt put before each."""
        import base64

        import numpy as np

        answer = self.ask(do="queries", texts=list(texts))
        return np.frombuffer(base64.b64decode(answer["data"]), dtype=np.float32).reshape(len(texts), answer["dim"])

    def start(self) -> None:
        """Start the process and wait until its model is loaded; does nothing when it is.

        Raises:
            ConfigError: the model cannot be loaded as asked.
            Stopped: the process died.
        """
        if self._worker is None:
            self._worker = WorkerProcess(self._device, self._settings, self._cores, self._events)
            self.ready = self._answer(self._worker)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; raises as ``start`` does."""
        self.start()
        assert self._worker is not None
        self._worker.send(**request)
        return self._answer(self._worker)

    def _answer(self, worker: WorkerProcess) -> dict[str, Any]:
        _, message = self._events.get()
        if message is None:
            self._worker = None
            raise Stopped(f"the worker on {self._device} {worker.cause_of_death()}")
        if message["event"] == "error":
            if message["exit_code"] == EXIT_CONFIG:
                raise ConfigError(message["message"])
            raise RuntimeError(message["trace"] or message["message"])
        answer: dict[str, Any] = message
        return answer

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def child_environment(threads: int, *, offline: bool = True) -> dict[str, str]:
    """The environment of a child process: it finds this package, uses ``threads`` cores, and fetches no model."""
    package_parent = str(Path(__file__).resolve().parent.parent)
    paths = [package_parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # numpy's threads spin for a while after each product, on the cores that FAISS and torch compute on.
        "OPENBLAS_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),  # the coordinator has found the model's folder
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
    }


def _visible(device: str) -> dict[str, str]:
    """One GPU a worker, chosen from the list this process was given (which may hold UUIDs)."""
    if not device.startswith("cuda"):
        return {"CUDA_VISIBLE_DEVICES": ""}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = int(device.partition(":")[2] or 0)
    return {"CUDA_VISIBLE_DEVICES": visible[number] if number < len(visible) else str(number)}
