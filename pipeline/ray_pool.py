"""The pool of a run on a Ray cluster: actors instead of child processes, one a device; all else is the local pool's.

    run ── pool ──pipe── ray_driver.py ──Ray── ray_actor.py ──pipe── worker.py     (the last two on each node)

Ray places the actors, notices nodes that die, and waits for room where a replacement has none. What is handed out, to
whom, and how often is decided by ``pool.Pool``, and what counts is decided by the commit records, so a node that was
believed dead and is not does no harm. Ray itself is imported by ``ray_driver.py`` alone.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import json
import os
import posixpath
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError, EmbedCorpusError, Stopped
from pipeline.model import ModelFolder
from pipeline.pool import STDERR_LINES, Events, Pool, PoolWorker, child_environment
from pipeline.ray_actor import Start
from pipeline.records import Shard
from pipeline.storage import TEMPORARY_SUFFIX, open_output
from pipeline.worker_settings import WorkerSettings

CONNECT_S = 60.0
CLOSE_S = 15.0  # the driver takes up to eight for the actors
NO_NODE_S = 900.0  # an autoscaler takes up to ten minutes for a machine
SAY_WAITING_S = 10.0
MAX_INPUTS_CHECKED = 20
PASSED_ON = ("AWS_", "AZURE_", "EMBED_CORPUS_NO_TUNING", "FSSPEC_", "GOOGLE_", "HF_")  # beginnings of names
Node = tuple[int, int]
"""CPUs and GPUs of one node."""


def resolve_actors(option: str, nodes: Sequence[Node]) -> tuple[list[str], int]:
    """One entry an actor, ``cuda`` or ``cpu``, and the CPUs that each of them takes.

    A GPU actor takes one GPU, wherever Ray finds it, and its node's share of CPUs. CPU actors are as large as they can
    be: one process with eight cores holds one model, eight processes hold eight.

    Args:
        option: ``--devices``: ``auto`` (a ``cuda`` for each GPU of the cluster; where it has none, CPU actors as large
            as the nodes), or a list: ``cuda,cuda`` and ``cpu,cpu`` are two actors each. For more than fit now, room is
            waited for.
        nodes: those alive.

    Raises:
        ConfigError: a name that is no such device, or nothing to compute on.
    """
    names = [name.strip().lower() for name in option.split(",") if name.strip()]
    gpus, cpus = sum(gpu for _, gpu in nodes), sum(cpu for cpu, _ in nodes)
    if names == ["auto"] and gpus:
        names = ["cuda"] * gpus
    elif names == ["auto"]:
        if not cpus:
            raise ConfigError("--devices auto: the Ray cluster offers neither GPUs nor CPUs now; name them: cuda,cuda")
        # A small node, such as the head, must not make all actors small: nine tenths in use are enough.
        size = _largest(nodes, lambda size, count: 10 * size * count >= 9 * cpus)
        return ["cpu"] * _room(nodes, size), size
    if not names or set(names) not in ({"cuda"}, {"cpu"}):
        raise ConfigError(
            f"--devices {option}: with --backend ray expected auto, or one kind for each actor: cuda,cuda or cpu,cpu "
            "(Ray chooses which of a node's GPUs it is)"
        )
    if names[0] == "cuda":
        return names, min((cpu // gpu for cpu, gpu in nodes if gpu), default=1)
    return names, _largest(nodes, lambda size, count: count >= len(names))


def _room(nodes: Iterable[Node], size: int) -> int:
    """How many actors of so many CPUs find room."""
    return sum(cpu // size for cpu, _ in nodes)


def _largest(nodes: Sequence[Node], fits: Callable[[int, int], bool]) -> int:
    """The most CPUs an actor can have so that ``fits(CPUs, room for how many)``; 1 where none does."""
    sizes = range(max((cpu for cpu, _ in nodes), default=1), 0, -1)
    return next((size for size in sizes if fits(size, _room(nodes, size))), 1)


class RayCluster:
    """The connection to a cluster, held by a process of its own. Use as a context manager.

    Which cluster: the one of ``RAY_ADDRESS``, else the one this machine is a node of. None is started.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
        Stopped: the cluster does not answer.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--backend ray needs a package that is not installed; pip install 'embed-corpus[ray]'")
        self.nodes: list[Node] = []
        self._numbers = itertools.count()
        self._workers: dict[int, RayWorker] = {}
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._sending = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> RayCluster:
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.ray_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**child_environment(1), "RAY_IGNORE_UNHANDLED_ERRORS": "1"},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the coordinator alone, as with workers
        )
        self._threads = [
            threading.Thread(target=self._read_stderr, args=(self._process,), daemon=True),
            threading.Thread(target=self._read_answers, args=(self._process,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            message = self._said.get(timeout=CONNECT_S)
        except queue.Empty:
            raise Stopped(f"--backend ray: the cluster did not answer within {CONNECT_S:.0f} s; run again") from None
        if message is None:
            raise Stopped(self._gone())
        if message["event"] == "error":
            raise (ConfigError if message["exit_code"] == EXIT_CONFIG else Stopped)(message["message"])
        self.nodes = [(cpus, gpus) for cpus, gpus in message["nodes"]]

    def _gone(self) -> str:
        last = next((line.strip() for line in reversed(self._stderr) if line.strip()), "")
        return "the connection to the Ray cluster is lost" + (f" ({last})" if last else "") + "; run again to continue"

    def _read_stderr(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._stderr.append(line.rstrip())

    def _read_answers(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                if "worker" not in message:
                    self._said.put(message)
                    if message["event"] == "error":
                        self._lose(message["message"])
                elif (worker := self._workers.get(message.pop("worker"))) is not None:
                    worker.take(message)
        process.wait()
        self._said.put(None)
        self._lose(self._gone())

    def _lose(self, reason: str) -> None:
        """No worker will be heard of again."""
        for worker in list(self._workers.values()):
            worker.take({"event": "error", "unit": None, "exit_code": EXIT_STOPPED, "message": reason})

    def resolve_devices(self, option: str) -> tuple[list[str], int]:
        """One entry an actor, and the CPUs of all together; see `resolve_actors`."""
        devices, num_cpus = resolve_actors(option, self.nodes)
        return devices, num_cpus * len(devices)

    def pool(self, *args: Any) -> RayPool:
        """Workers on this cluster; see `RayPool`."""
        return RayPool(self, *args)

    def start(self, worker: RayWorker, num_cpus: int, num_gpus: int, start: Start) -> int:
        """Ask for an actor; returns the number that ``send`` and ``end`` know it by."""
        number = next(self._numbers)
        self._workers[number] = worker
        self._request(do="start", worker=number, num_cpus=num_cpus, num_gpus=num_gpus, start=start.to_json())
        return number

    def send(self, number: int, request: dict[str, Any]) -> None:
        self._request(do="send", worker=number, request=request)

    def end(self, number: int) -> None:
        if self._workers.pop(number, None) is not None:
            self._request(do="end", worker=number)

    def _request(self, **request: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):  # its end is reported by the thread that reads
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End all actors and the connection; does nothing the second time."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._workers.clear()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the driver ends its actors and leaves
        try:
            process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # then Ray ends them
            process.wait()
        for thread in self._threads:
            thread.join()


class RayWorker(PoolWorker):
    """A worker on some node, or one that waits for a node.

    Args:
        cluster: the connection.
        device: ``cuda`` or ``cpu``.
        num_cpus: that it takes.
        start: for the actor.
        events: see `pool.Pool`.
    """

    def __init__(self, cluster: RayCluster, device: str, num_cpus: int, start: Start, events: Events) -> None:
        super().__init__(device)
        self.node = ""
        self._cluster, self._events, self._cause = cluster, events, ""
        self._number = cluster.start(self, num_cpus, int(device == "cuda"), start)

    @property
    def place(self) -> str:
        return f"{self.device} of node {self.node}" if self.node else self.device

    def take(self, message: dict[str, Any]) -> None:
        """A message from the node, or about it."""
        if message["event"] == "placed":
            self.node = message["node"]
        elif message["event"] == "lost":
            self._cause, self.died_with_node = message["cause"], message["with_node"]
            self._events.put((self, None))
        else:
            self._events.put((self, message))

    def send(self, **request: Any) -> None:
        self._cluster.send(self._number, request)

    def kill(self) -> None:
        self._cluster.end(self._number)
        self._cause = "gave no sign of life and was ended"
        self._events.put((self, None))

    def close(self) -> None:
        self._cluster.end(self._number)

    def cause_of_death(self) -> str:
        return self._cause


class RayPool(Pool):
    """One actor a device.

    Args:
        cluster: connected; left with the pool, so that no actor holds a device any longer.
        devices, cores: see `RayCluster.resolve_devices`.
        settings: as for workers of this machine.
        model, model_fields: must be found alike on every node.
        shards: some of them must be, too.
        say: shows a line.
    """

    def __init__(
        self,
        cluster: RayCluster,
        devices: Sequence[str],
        cores: int,
        settings: WorkerSettings,
        model: ModelFolder,
        model_fields: Mapping[str, str],
        shards: Sequence[Shard],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(devices, settings, cores)
        self._cluster, self._num_cpus, self._say = cluster, cores // len(devices), say
        self._model = str(model.path) if Path(model.name).expanduser().is_dir() else model.name
        self._model_fields = dict(model_fields)
        self._inputs = _one_a_folder(shards)
        self._output = open_output(settings.output)
        self._token = f".ray-{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        self._alone_since, self._said_waiting = time.monotonic(), False

    def __enter__(self) -> RayPool:
        self._output.write_json(self._token, {})
        self._say(
            f"Ray: {_count(len(self._devices), 'actor')} with {self._demand()} each, "
            f"{_count(len(self._cluster.nodes), 'node')} in the cluster"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()
        with contextlib.suppress(EmbedCorpusError):  # an empty file, hidden
            self._output.remove(self._token)

    def _demand(self) -> str:
        cpus = _count(self._num_cpus, "CPU")
        return f"1 GPU and {cpus}" if self._devices[0] == "cuda" else cpus

    def _start(self, device: str) -> RayWorker:
        start = Start(
            settings=self._settings,
            device=device,
            threads=self._threads,
            environment=passed_on(),
            version=__version__,
            token=self._token,
            model=self._model,
            model_fields=self._model_fields,
            inputs=self._inputs,
        )
        return RayWorker(self._cluster, device, self._num_cpus, start, self._events)

    def _watch(self) -> None:
        super()._watch()
        if any(worker.node for worker in self._workers if isinstance(worker, RayWorker)):
            self._alone_since, self._said_waiting = time.monotonic(), False
            return
        waited = time.monotonic() - self._alone_since
        if waited > NO_NODE_S:
            raise Stopped(
                f"no node of the Ray cluster had room for a worker ({self._demand()}) for {NO_NODE_S / 60:.0f} "
                "minutes; run again when one has"
            )
        if waited > SAY_WAITING_S and not self._said_waiting:
            self._said_waiting = True
            self._say(f"waiting for a node of the Ray cluster with room for a worker ({self._demand()})")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def passed_on() -> dict[str, str]:
    """What a node needs of this machine's environment. Not as Ray's runtime environment: its dashboard shows that."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def _one_a_folder(shards: Sequence[Shard]) -> list[tuple[str, int]]:
    """What a node must see of the input: whole folders are missing, seldom single files."""
    first: dict[str, tuple[str, int]] = {}
    for shard in shards:
        first.setdefault(posixpath.dirname(shard.path), (shard.path, shard.size_bytes))
    return list(first.values())[:MAX_INPUTS_CHECKED]
