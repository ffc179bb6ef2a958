"""``python -m tests.serve_load OUTPUT``: ``embed-corpus serve`` with more to do than it can, and for long.

    own answers   16 clients ask for 1 to 32 texts of mixed lengths at once; each vector is compared with the same
                  text's computed alone
    overload      requests of 16 texts come five times as fast as they can be computed, whether the ones before were
                  answered or not; nothing is asked again. In each of ``--rounds`` the peak is measured first
    memory        32 clients with single queries, for ``--minutes``; resident memory of all processes every half minute

It prints one line a figure. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.serve_bench import WORDS, Client, many_clients, percentiles, query, resident_mb, server
from tests.slurm import free_ports

NUM_TEXTS = 16
CLIENT_PATIENCE_S = 60.0
"""Far above any deadline: a request that takes so long hangs."""


@dataclass(frozen=True)
class Overload:
    """What came of requests that came too fast.

    Attributes:
        offered, peak, served: texts a second: asked for, computed without overload, computed under it.
        statuses: how many requests ended with each HTTP status; 0 for one that was not answered.
        seconds: of each request.
    """

    offered: float
    peak: float
    served: float
    statuses: dict[int, int]
    seconds: list[float]


def mixed_texts(rng: random.Random, count: int) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.choice((1, 5, 12, 60, 200)))) for _ in range(count)]


def answered(client: Client, texts: list[str]) -> NDArray[np.float64]:
    """(n, dim); asked for again where the server says that it is busy. Late is not wrong: the deadline is ours."""
    while True:
        status, body, _ = client.embed(texts, {"x-request-timeout-ms": f"{1000 * CLIENT_PATIENCE_S:.0f}"})
        if status == 200:
            return np.array(json.loads(body))
        assert status == 429, body
        time.sleep(0.5)


def own_answers(port: int, num_clients: int, num_requests: int) -> float:
    """The largest |difference| of a number to the vector that the same text has alone.

    Raises:
        AssertionError: a request failed otherwise than by 429, or an answer has another shape.
    """
    worst = [0.0] * num_clients

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        with Client(port) as client:
            for _ in range(num_requests):
                texts = mixed_texts(rng, rng.randint(1, 32))
                vectors = answered(client, texts)
                chosen = rng.randrange(len(texts))
                alone = answered(client, [texts[chosen]])
                assert len(vectors) == len(texts) and vectors.shape[1] == alone.shape[1]
                worst[seed] = max(worst[seed], float(np.abs(vectors[chosen] - alone[0]).max()))

    failed: list[BaseException] = []

    def noted(seed: int) -> None:
        try:
            ask(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=noted, args=(seed,)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(worst)


async def _post(port: int, body: bytes) -> int:
    """The status of one request on a connection of its own; 0 when none came."""
    try:
        async with asyncio.timeout(CLIENT_PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = "POST /embed HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read()
            writer.close()
            return int(answer.split(b" ", 2)[1])
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0


def overload(port: int, times: float, seconds: float) -> Overload:
    """Ask for ``times`` what it can do, evenly, for so long."""
    rng = random.Random(1)
    bodies = [json.dumps({"inputs": [query(rng) for _ in range(NUM_TEXTS)]}).encode() for _ in range(200)]

    async def peak() -> float:
        end, done = time.perf_counter() + seconds, 0

        async def ask(number: int) -> None:
            nonlocal done
            while time.perf_counter() < end:
                status = await _post(port, bodies[(number + done) % len(bodies)])
                assert status in (200, 504), status
                done += status == 200

        began = time.perf_counter()
        await asyncio.gather(*(ask(number) for number in range(8)))
        return done * NUM_TEXTS / (time.perf_counter() - began)

    async def flood(rate: float) -> tuple[list[tuple[int, float, float]], float]:
        answers: list[tuple[int, float, float]] = []
        began = time.perf_counter()

        async def ask(number: int) -> None:
            asked = time.perf_counter()
            status = await _post(port, bodies[number % len(bodies)])
            answers.append((status, time.perf_counter() - asked, time.perf_counter() - began))

        tasks = []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(number)))
        asked_for = time.perf_counter() - began
        await asyncio.gather(*tasks)
        return answers, asked_for

    best = asyncio.run(peak())
    answers, asked_for = asyncio.run(flood(times * best / NUM_TEXTS))
    # Only while they come too fast: the rest is a queue that empties.
    served = sum(status == 200 and at <= asked_for for status, _, at in answers) * NUM_TEXTS / asked_for
    return Overload(
        len(answers) * NUM_TEXTS / asked_for,
        best,
        served,
        dict(sorted(collections.Counter(status for status, _, _ in answers).items())),
        [took for _, took, _ in answers],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--rounds", type=int, default=5, help="of peak and overload")
    parser.add_argument("--seconds", type=float, default=10, help="of each part of a round")
    parser.add_argument("--minutes", type=float, default=10, help="of watching the memory")
    options = parser.parse_args()
    [port] = free_ports(1)
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "cli", "serve", options.output, "--port", str(port)]
        process = stack.enter_context(server(command, port))
        print(f"own answers  largest |difference| {own_answers(port, 16, 20):.1e} (16 clients, 320 requests)")
        for found in (rounds := [overload(port, 5, options.seconds) for _ in range(options.rounds)]):
            statuses = ", ".join(f"{status}: {count:,}" for status, count in found.statuses.items())
            print(f"overload     {found.offered:,.0f} texts/s asked for, {found.peak:,.0f} can be computed")
            print(f"             {found.served:,.0f} computed ({found.served / found.peak:.0%} of the peak)")
            print(f"             {percentiles(found.seconds)}, longest {max(found.seconds):.2f} s; {statuses}")
        shares = sorted(found.served / found.peak for found in rounds)
        print(f"             median {statistics.median(shares):.0%} [{shares[0]:.0%}, {shares[-1]:.0%}] of the peak")
        end = time.monotonic() + 60 * options.minutes
        sizes = [resident_mb(process)]
        rates = []
        while time.monotonic() < end:
            rates.append(many_clients(port, 32, 30)[0])
            sizes.append(resident_mb(process))
        print(f"memory       {', '.join(f'{size:.0f}' for size in sizes)} MB, every 30 s under 32 clients")
        if rates:
            print(f"             {min(rates):,.0f} to {max(rates):,.0f} answers/s")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
