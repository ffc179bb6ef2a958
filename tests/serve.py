"""What the tests of the server share: an engine whose vectors can be computed by hand, and servers as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from pipeline.serving.engine import Embedded, EngineInfo, Token
from pipeline.serving.errors import TooLong
from pipeline.serving.service import Service
from pipeline.serving.settings import ServeSettings
from tests.conftest import ROOT
from tests.stand_in import DIM, MAX_LENGTH, vector_of

PROMPTS = {"query": "q ", "clustering": "c "}


@dataclass
class HandEngine:
    """As `Engine`, but a vector is what `vector_of` gives, and the test says what goes wrong.

    Attributes:
        raises: errors of the next calls, in order; None lets one through.
        gate: where it is set, calls wait for it.
        calls: what was asked for.
        scale: length of the vectors.
        cancelled: calls that were cancelled while they waited.
    """

    raises: list[Exception | None] = field(default_factory=list)
    gate: asyncio.Event | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    scale: float = 1.0
    seed: int = 0
    is_up: bool = True
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            model="hand-made",
            model_path="/models/hand-made",
            dim=DIM,
            max_length=MAX_LENGTH,
            dtype="float32",
            device="cpu",
            pooling="mean",
            normalize=self.scale == 1.0,
            prompts=PROMPTS,
            document_prompt="d ",
            query_prompt="q ",
            fingerprint="f1",
            lane="hand",
            attention="grouped",
        )
        self.stats = SimpleNamespace(
            queue_tokens=3, queue_requests=1, in_flight=0, batches=7, batch_fill=0.5, tokens_per_s=100.0, restarts=0
        )

    async def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        truncate: bool = True,
        lane: str = "query",
        deadline: float,
        cancelled: Any = None,
    ) -> Embedded:
        left_s = deadline - asyncio.get_running_loop().time()
        call = {"texts": list(texts), "prompt": prompt, "truncate": truncate, "lane": lane, "left_s": left_s}
        self.calls.append(call)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.raises and (error := self.raises.pop(0)) is not None:
            raise error
        for index, text in enumerate(texts):
            if not truncate and len(prompt + text) > MAX_LENGTH:
                raise TooLong(index, len(prompt + text), MAX_LENGTH)
        vectors = np.stack([self.vector(prompt + text) for text in texts])
        num_tokens = np.array([min(len(prompt + text), MAX_LENGTH) for text in texts], dtype=np.int64)
        seconds = {"queue": 0.001, "tokenize": 0.002, "compute": 0.003}
        return Embedded(vectors, num_tokens, num_tokens == MAX_LENGTH, seconds, lane)

    def vector(self, text: str) -> Any:
        vector = vector_of(text) if text else np.full(DIM, DIM**-0.5, dtype=np.float32)
        return self.scale * np.roll(vector, self.seed)

    def tokenize(self, texts: Sequence[str], prompt: str = "") -> list[list[Token]]:
        whole = [prompt + text for text in texts]
        start = Token(1, "[CLS]", True, None, None)
        return [[start, *(Token(2, one, False, at, at + 1) for at, one in enumerate(text))] for text in whole]

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        pass


def hand_service(engine: HandEngine | None = None, **options: Any) -> Service:
    parts = {name: options.pop(name) for name in ("search", "log", "spans") if name in options}
    return Service(engine or HandEngine(), ServeSettings(**options), **parts)  # type: ignore[arg-type]


def client_of(service: Service) -> httpx.AsyncClient:
    """Speaks to the service's routes, without a network."""
    from pipeline.serving.app import build_app

    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def stand_in_run(source: Path, output: Path, model_dir: str, **options: Any) -> None:
    """A finished run and its index, with the stand-in's vectors; ``source`` may have changed since the last one."""
    options = {"index": "auto", "columns": "text", "model": model_dir, **options}
    done = subprocess.run(
        [sys.executable, "-m", "tests.drive", str(source), str(output), options.pop("model"), json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged under this name so far."""
        lines = [line for line in self.log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, name: str, count: int = 1, timeout_s: float = 60) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.events(name)) >= count, timeout_s, f"{count} × '{name}' in the log")
        return self.events(name)


def wait_until(is_so: Any, timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"waited {timeout_s} s in vain for {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def running_server(folder: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
    """``embed-corpus serve`` on a free port, ready; ended with SIGTERM.

    Args:
        folder: for its log and, where ``environ`` says nothing else, its caches.
        *arguments: of the command.
        environ: beside this process's own variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with open(log, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", *arguments, "--port", "0"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        server = Server(process, "", log)
        wait_until(lambda: process.poll() is not None or server.events("ready"), 240, "the server to be ready")
        assert process.poll() is None, log.read_text(encoding="utf-8")
        server.url = server.events("ready")[0]["url"]
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
