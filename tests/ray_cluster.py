"""A real Ray cluster on loopback whose nodes can be killed: ``python -m tests.ray_cluster``, a process apart.

It takes commands on stdin and answers each with one line: ``node CPUS GPUS`` starts a node and says its number, ``kill
NUMBER`` kills all its processes at once, ``settle`` waits until Ray has noticed, ``address`` says where to connect.
When stdin ends the cluster ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.conftest import ROOT

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray takes no less than 75 MiB
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 6}


class RayCluster:
    """The cluster as tests see it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self.ask("address")

    def ask(self, *command: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*command, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def add_node(self, num_cpus: int = 1, num_gpus: int = 0) -> str:
        return self.ask("node", num_cpus, num_gpus)

    def kill_node(self, number: str) -> None:
        assert self.ask("kill", number) == "killed"

    def settle(self) -> None:
        """Wait until Ray counts the nodes that there are."""
        assert self.ask("settle") == "settled"

    def workers(self) -> list[psutil.Process]:
        """The processes on all nodes that load a model."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if "pipeline.worker" in process.cmdline():
                    found.append(process)
            except psutil.Error:  # it has just ended
                continue
        return found


@contextmanager
def ray_cluster(nodes: int, **environment: str) -> Iterator[RayCluster]:
    """A head and ``nodes - 1`` further nodes with one CPU each, and their environment beside this process's."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets have long names already
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "", "RAY_TMPDIR": folder}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ray_cluster", str(nodes)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **ray, **environment},
    ) as process:  # fmt: skip
        try:
            yield RayCluster(process)
        finally:
            left = psutil.Process(process.pid).children(recursive=True)
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            _, alive = psutil.wait_procs(left, timeout=20)
            for one in alive:
                one.kill()
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints what it likes
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster()
    cluster.add_node(num_cpus=1, _system_config=HEALTH, **common)
    nodes = [cluster.add_node(num_cpus=1, **common) for _ in range(int(sys.argv[1]) - 1)]
    for line in sys.stdin:
        command, *values = line.split()
        if command == "address":
            answer = cluster.address
        elif command == "node":
            nodes.append(cluster.add_node(num_cpus=int(values[0]), num_gpus=int(values[1]), **common))
            answer = str(len(nodes) - 1)
        elif command == "kill":
            cluster.remove_node(nodes[int(values[0])], allow_graceful=False)
            answer = "killed"
        elif command == "settle":
            cluster.wait_for_nodes(timeout=60)
            answer = "settled"
        print(answer, file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
