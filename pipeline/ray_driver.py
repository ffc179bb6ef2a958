"""The process of a run that talks to Ray: ``python -m pipeline.ray_driver`` takes requests on stdin, a JSON line each.

It is apart from the coordinator because Ray ends the process that is connected to it when the cluster is lost, prints
to its stdout, and takes its signal handlers. When stdin ends the coordinator is gone, or is done: all actors are ended,
and the process after them. Where this process dies, Ray ends its actors, and each actor's end ends its worker.

    requests   start {worker, num_cpus, num_gpus, start} · send {worker, request} · end {worker}
    answers    cluster {nodes} · placed {worker, node} · lost {worker, cause, with_node} · error {message, exit_code}
               and what each worker says, with ``worker`` beside it
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from pipeline.errors import EXIT_BUG, EXIT_CONFIG, EXIT_STOPPED, ConfigError, EmbedCorpusError, Stopped
from pipeline.ray_actor import NodeWorker

CONNECT_S = 10.0
DECIDE_S = 60.0  # Ray takes a node for dead after about fifteen to thirty
END_S = 8.0  # an actor takes up to five for a worker that does not end by itself
NOT_FOUND = "start one with 'ray start --head', run this on one of its nodes, or set RAY_ADDRESS"


class Driver:
    """Starts and ends actors, and hands on what they say.

    Args:
        say: sends one answer; may be called from any thread.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._ray: Any = None
        self._node_id = ""
        self._actors: dict[int, Any] = {}
        self._placed: set[int] = set()

    def connect(self) -> None:
        """Join the cluster and say what it has.

        Raises:
            ConfigError: there is no cluster, or this machine cannot be part of it.
            Stopped: it does not answer.
        """
        address = os.environ.get("RAY_ADDRESS", "")
        if "://" in address:
            raise ConfigError(
                f"RAY_ADDRESS {address}: Ray Client is not supported; run the command on a node of the cluster, for "
                "example with 'ray job submit'"
            )
        _knock(address)
        self._ray = importlib.import_module("ray")
        try:
            self._ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError:
            raise ConfigError(f"--backend ray: this machine is no node of a Ray cluster; {NOT_FOUND}") from None
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"--backend ray: {' '.join(str(error).split())}; {NOT_FOUND}") from None
        self._node_id = self._ray.get_runtime_context().get_node_id()
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._say("cluster", nodes=[[int(r.get("CPU", 0)), int(r.get("GPU", 0))] for r in resources])

    def do(self, request: dict[str, Any]) -> None:
        worker = request["worker"]
        if request["do"] == "start":
            self._start(worker, request)
        elif request["do"] == "send" and worker in self._actors:
            self._actors[worker].send.remote(request["request"])
        elif request["do"] == "end":
            self._end([worker])

    def _start(self, worker: int, request: dict[str, Any]) -> None:
        actor = self._actors[worker] = (
            self._ray.remote(NodeWorker)
            .options(
                num_cpus=request["num_cpus"],
                num_gpus=request["num_gpus"],
                max_concurrency=4,
                scheduling_strategy="SPREAD",  # workers of one machine would share its memory while others are idle
            )
            .remote()
        )
        threading.Thread(target=self._listen, args=(worker, actor, request["start"]), daemon=True).start()

    def _listen(self, worker: int, actor: Any, start: dict[str, Any]) -> None:
        """Hand on what one worker says until it ends or Ray says that it is lost."""
        node_id = ""
        try:
            node_id, address = self._ray.get(actor.where.remote())  # waits until some node has room for it
            self._placed.add(worker)
            self._say("placed", worker=worker, node=address)
            actor.begin.remote(start)
            while True:
                for message in self._ray.get(actor.answers.remote()):
                    if message["event"] == "ended":
                        self._say("lost", worker=worker, cause=message["cause"], with_node=False)
                        return
                    if message["event"] == "error" and message["exit_code"] != EXIT_BUG:
                        message["message"] = f"node {address}: {message['message']}"
                    self._say(**message, worker=worker)
        except self._ray.exceptions.RayError as error:
            self._lost(worker, node_id, error)

    def _lost(self, worker: int, node_id: str, error: Exception) -> None:
        if getattr(error, "actor_init_failed", False) or isinstance(error, self._ray.exceptions.RuntimeEnvSetupError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            node = re.search(r"\bip=([^,)\s]+)", str(error))
            self._say(
                "error", worker=worker, unit=None, exit_code=EXIT_CONFIG, trace=None,
                message=f"node {node.group(1) if node else 'unknown'} of the Ray cluster cannot start a worker "
                f"({lines[-1]}); expected embed-corpus in the Python that Ray runs in, the same version on every node",
            )  # fmt: skip
            return
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            # What it said may be lost, so it is given up; but Ray knows only later whether its node is gone.
            try:
                self._ray.get(self._actors[worker].where.remote(), timeout=DECIDE_S)
            except KeyError:
                return  # ended meanwhile
            except self._ray.exceptions.RayError as later:
                error = later
        with contextlib.suppress(Exception):  # one that cannot be reached may still be there
            self._ray.kill(self._actors[worker])
        dead = set()
        with contextlib.suppress(Exception):
            dead = {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}
        if self._node_id in dead:  # Ray has ended all actors and will place no other
            message = "this machine is no longer a node of the Ray cluster; run again when it is"
            self._say("error", message=message, exit_code=EXIT_STOPPED)
            return
        with_node = node_id in dead or "node has died" in str(error)
        cause = "died with its node" if with_node else f"was lost: {_reason(error)}"
        self._say("lost", worker=worker, cause=cause, with_node=with_node)

    def _end(self, workers: list[int]) -> None:
        actors = {worker: self._actors.pop(worker) for worker in workers if worker in self._actors}
        # One that waits for a node would not answer; taking it out of Ray's queue is enough.
        closing = [actor.close.remote() for worker, actor in actors.items() if worker in self._placed]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=END_S)
        for actor in actors.values():
            self._ray.kill(actor)

    def close(self) -> None:
        """End all actors and leave the cluster."""
        if self._ray.is_initialized():
            self._end(list(self._actors))
            self._ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself would take minutes to find out that nobody is there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise Stopped(
            f"RAY_ADDRESS {address}: the cluster does not answer ({error}); run again when it does, or mend the address"
        ) from None


def _reason(error: Exception) -> str:
    """What Ray says, without the table of ids before it and the advice after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints what it hears of nodes
    lock = threading.Lock()

    def say(event: str, **values: Any) -> None:
        with lock:
            answers.write(json.dumps({"event": event, **values}) + "\n")
            answers.flush()

    driver = Driver(say)
    try:
        driver.connect()
    except EmbedCorpusError as error:
        say("error", message=str(error), exit_code=error.exit_code)
        return error.exit_code
    for line in sys.stdin:
        driver.do(json.loads(line))
    driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
