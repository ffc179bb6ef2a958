"""On a node of a Ray cluster: one ordinary worker process, and the way between its pipe and the run.

The process that Ray gives an actor starts ``python -m pipeline.worker`` as the coordinator would on its own machine and
hands messages on, unread. Before that it makes sure that the node sees what the run sees: another folder under the same
name would take vectors that nobody finds again. When the actor goes, however it goes, the worker's stdin ends and the
worker with it.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline import __version__
from pipeline.errors import ConfigError, Stopped
from pipeline.model import open_model
from pipeline.pool import Events, WorkerProcess
from pipeline.remote import open_filesystem, tried
from pipeline.storage import open_output
from pipeline.units import say_error
from pipeline.worker_settings import WorkerSettings

VISIBLE_WITHIN_S = 10.0  # a network file system may show a new file late


@dataclass(frozen=True)
class Start:
    """What an actor is told when it starts.

    Attributes:
        settings: for the worker; the model's folder in it is the one of the coordinator's machine.
        device: ``cpu``, or ``cuda`` for the one GPU that Ray gives the actor.
        threads: cores the worker may use.
        environment: variables of the coordinator that count on the node too: credentials, endpoints.
        version: of this package.
        token: name of a file in the output; only who sees the same place finds it.
        model: the folder or model id to look for.
        model_fields: hashes of its files, by what they are.
        inputs: path and size of some shards.
    """

    settings: WorkerSettings
    device: str
    threads: int
    environment: Mapping[str, str]
    version: str
    token: str
    model: str
    model_fields: Mapping[str, str]
    inputs: Sequence[tuple[str, int]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Start:
        return cls(**{**document, "settings": WorkerSettings.from_json(document["settings"])})


class NodeWorker:
    """The actor. Its methods are called side by side: ``answers`` waits while ``send`` brings requests."""

    def __init__(self) -> None:
        self._events: Events = queue.Queue()
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()

    def where(self) -> tuple[str, str]:
        """Ray's id of the node, and its address."""
        ray: Any = importlib.import_module("ray")
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def begin(self, document: dict[str, Any]) -> None:
        """Check the node and start the worker; what is wrong arrives among the answers."""
        try:
            if document["version"] != __version__:  # first: another version's document may read differently
                raise ConfigError(
                    f"has embed-corpus {__version__}, the run is {document['version']}; install one version everywhere"
                )
            os.environ.update(document["environment"])
            start = Start.from_json(document)
            settings = check_node(start)
            device = "cuda:0" if start.device.startswith("cuda") else start.device
            worker = WorkerProcess(device, settings, start.threads, self._events)
        except Exception as error:
            say_error(lambda event, **values: self._said.put({"event": event, **values}), error)
            return
        self._worker = worker
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def _read(self, worker: WorkerProcess) -> None:
        while True:
            _, message = self._events.get()
            if message is None:
                self._said.put({"event": "ended", "cause": worker.cause_of_death()})
                return
            self._said.put(message)

    def send(self, request: dict[str, Any]) -> None:
        """Pass a request on; one for a worker that has ended is lost with it."""
        with self._lock:
            if self._worker is not None:
                self._worker.send(**request)

    def answers(self) -> list[dict[str, Any]]:
        """All that the worker has said since the last call; waits until there is something."""
        said = [self._said.get()]
        while not self._said.empty():
            said.append(self._said.get())
        return said

    def close(self) -> None:
        """End the worker and wait for it."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()


def check_node(start: Start) -> WorkerSettings:
    """The settings as they hold on this node, once it is sure that output, model and input are the run's own.

    Raises:
        ConfigError: one of them is not.
        Stopped: a store does not answer.
    """
    settings = start.settings
    output = open_output(settings.output)
    until = time.monotonic() + VISIBLE_WITHIN_S
    while output.read_json(start.token) is None:
        if time.monotonic() > until:
            raise ConfigError(
                f"does not see what the run writes to --output {settings.output}; expected a folder that all nodes "
                "share under that name, or a URL such as s3://bucket/prefix"
            )
        time.sleep(0.2)
    output.prepare()
    model = open_model(start.model, trust_remote_code=settings.encoder.trust_remote_code)
    found = model.fingerprint_fields()
    different = [name for name, value in start.model_fields.items() if found.get(name) != value]
    if different:
        raise ConfigError(
            f"model {start.model}: its files are not those of the machine that runs the command "
            f"({', '.join(different)} differ); copy the same folder to every node"
        )
    for path, size in start.inputs:
        _check_input(path, size)
    return replace(settings, encoder=replace(settings.encoder, model_path=str(model.path)))


def _check_input(path: str, size: int) -> None:
    expected = "expected the input under the same name on every node, or a URL such as s3://bucket/prefix"
    what = f"input {path}: cannot be read"
    filesystem, name = open_filesystem(path)
    try:
        info = tried(what, lambda: filesystem.info(name))
    except ConnectionError as error:
        raise Stopped(f"{error}; run again when the store answers") from None
    except OSError as error:
        reason = str(error) if str(error).startswith(what) else f"{what} ({type(error).__name__})"
        raise ConfigError(f"{reason}; {expected}") from None
    if info["size"] != size:
        raise ConfigError(f"input {path}: {info['size']:,} bytes, {size:,} where the run began; {expected}")
