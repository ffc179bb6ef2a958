"""``python -m tests.serve_bench OUTPUT``: ``embed-corpus serve`` beside twenty lines around sentence-transformers.

Both serve the model of OUTPUT on this machine at the same time and take turns, so that they meet the same machine: one
client with 12-word queries over keep-alive, then 32 clients at once. It prints medians, and the memory of our server's
processes before and after. Leave the machine alone meanwhile.

    --blocks N     turns of each, 50 queries long (default 6)
    --seconds S    of each turn with many clients (default 10)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import psutil

from pipeline.ledger import read_run
from pipeline.storage import open_output
from tests.slurm import free_ports

BASELINE = """
import sys, uvicorn
from sentence_transformers import SentenceTransformer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

model = SentenceTransformer(sys.argv[1], device="cpu")

async def embed(request):
    texts = (await request.json())["inputs"]
    vectors = await run_in_threadpool(model.encode, texts if isinstance(texts, list) else [texts])
    return JSONResponse(vectors.tolist())

async def health(request):
    return JSONResponse({})

app = Starlette(routes=[Route("/embed", embed, methods=["POST"]), Route("/health", health)])
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
"""
TEXT = (
    "small boat harbour which sailing vessel carries passengers across the river mountain village where people "
    "learn mathematics number theory and old music with strings during winter near open water"
)
WORDS = TEXT.split()
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def query(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=12))


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Started, and ended in the end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None and time.monotonic() < deadline, f"{command[:4]} did not start"
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


class Client:
    """One connection that is kept; use it as a context manager."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def embed(self, inputs: str | list[str], headers: Mapping[str, str] = NO_HEADERS) -> tuple[int, bytes, float]:
        """Status, body and seconds of one call."""
        body = json.dumps({"inputs": inputs})
        start = time.perf_counter()
        self._connection.request("POST", "/embed", body, {"content-type": "application/json", **headers})
        answer = self._connection.getresponse()
        content = answer.read()
        return answer.status, content, time.perf_counter() - start


def one_client(port: int, num_queries: int, rng: random.Random) -> list[float]:
    taken = []
    with Client(port) as client:
        for _ in range(num_queries):
            status, _, seconds = client.embed(query(rng))
            assert status == 200
            taken.append(seconds)
    return taken


def many_clients(port: int, num_clients: int, seconds: float) -> tuple[float, list[float]]:
    """Answers a second, and the seconds of each."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        with Client(port) as client:
            while time.perf_counter() < end:
                status, _, took = client.embed(query(rng))
                assert status == 200
                taken.append(took)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(num_clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(taken) / (time.perf_counter() - start), taken


def resident_mb(process: subprocess.Popen[bytes]) -> float:
    parent = psutil.Process(process.pid)
    return sum(each.memory_info().rss for each in (parent, *parent.children(recursive=True))) / 1e6


def percentiles(seconds: list[float]) -> str:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99))
    return f"p50 {p50:7.2f} ms  p99 {p99:7.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    model = read_run(open_output(options.output))["model"]["path"]
    ours, theirs = free_ports(2)
    commands = {
        "embed-corpus serve": [sys.executable, "-m", "cli", "serve", options.output, "--port", str(ours)],
        "twenty lines": [sys.executable, "-c", BASELINE, model, str(theirs)],
    }
    ports = {"embed-corpus serve": ours, "twenty lines": theirs}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(server(command, ports[name])) for name, command in commands.items()}
        vectors = {name: np.array(json.loads(Client(port).embed("a small boat")[1])) for name, port in ports.items()}
        difference = np.abs(vectors["embed-corpus serve"] - vectors["twenty lines"]).max()
        print(f"largest |difference| of a number in one vector: {difference:.1e}")
        rng = random.Random(0)
        for port in ports.values():
            one_client(port, 50, rng)  # not counted
        alone: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(options.blocks):
            for name, port in ports.items():
                alone[name] += one_client(port, 50, rng)
        for name, taken in alone.items():
            print(f"one client   {name:20} {percentiles(taken)}  ({len(taken)} queries)")
        p50 = {name: statistics.median(taken) for name, taken in alone.items()}
        print(f"             ratio of the medians {p50['twenty lines'] / p50['embed-corpus serve']:.1f}")
        before = resident_mb(processes["embed-corpus serve"])
        rates: dict[str, list[float]] = {name: [] for name in ports}
        crowd: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(3):
            for name, port in ports.items():
                rate, taken = many_clients(port, 32, options.seconds)
                rates[name].append(rate)
                crowd[name] += taken
        for name, taken in crowd.items():
            print(f"32 clients   {name:20} {percentiles(taken)}  {statistics.median(rates[name]):6.0f} answers/s")
        ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
        print(f"             ratio of the rates {statistics.median(ratios):.1f}")
        after = resident_mb(processes["embed-corpus serve"])
        print(f"memory       embed-corpus serve   {before:.0f} MB before the crowd, {after:.0f} MB after it")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
