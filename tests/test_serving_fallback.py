"""Another server answers in our place only with our vectors; else nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from pipeline.serving.errors import DeadlineExceeded, EngineDown, Overloaded
from pipeline.serving.fallback import CANARY, HOP_HEADER, PROBES, unlike
from pipeline.serving.service import Service
from tests.serve import HandEngine, client_of, hand_service
from tests.stand_in import MAX_LENGTH, vector_of

Vector = Callable[[str], Any]


def ours(text: str) -> Any:
    return HandEngine().vector(text)


def of_another_model(text: str) -> Any:
    return HandEngine(seed=1).vector(text)


@dataclass
class Upstream:
    """A server that answers as TEI or OpenAI do, with the vectors it is told.

    Attributes:
        vector: of a text.
        status: of its answers.
        wait: held back until it is set.
        requests: (path, headers, texts) of each.
    """

    vector: Vector = ours
    status: int = 200
    wait: threading.Event | None = None
    requests: list[tuple[str, dict[str, str], list[str]]] = field(default_factory=list)
    url: str = ""

    def asked_for(self) -> list[list[str]]:
        """Texts of the requests that were not comparisons."""
        return [texts for _, _, texts in self.requests if not set(texts) <= set(PROBES)]

    @contextlib.contextmanager
    def running(self, port: int = 0) -> Iterator[Upstream]:
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                texts = body.get("inputs") or body.get("input")
                headers = {name.lower(): value for name, value in self.headers.items()}
                upstream.requests.append((self.path, headers, texts))
                if upstream.wait is not None:
                    upstream.wait.wait(30)
                rows = [upstream.vector(text).tolist() for text in texts]
                data = [{"index": index, "embedding": row} for index, row in enumerate(rows)][::-1]
                openai = {"data": data, "usage": {"prompt_tokens": 11}}
                content = json.dumps(rows if self.path == "/embed" else openai).encode()
                with contextlib.suppress(ConnectionError):
                    self.send_response(upstream.status)
                    self.send_header("content-length", str(len(content)))
                    self.send_header("x-compute-tokens", "7")
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            if self.wait is not None:
                self.wait.set()
            server.shutdown()
            thread.join()
            server.server_close()


FULL = Overloaded(3, "the queue is full")


@contextlib.asynccontextmanager
async def served(engine: HandEngine, *upstreams: Any, compared: bool = True, **options: Any) -> Any:
    """(service, client) with these fallbacks, each compared once."""
    given = [each if isinstance(each, dict) else {"url": each.url, "api": "tei"} for each in upstreams]
    service = hand_service(engine, fallbacks=given, access_log=False, **options)
    await service.start()
    try:
        async with client_of(service) as client:
            if compared:
                await until(lambda: all(state != "not compared yet" for state in states(service).values()))
            yield service, client
    finally:
        await service.stop()


def states(service: Service) -> dict[str, str]:
    assert service.fallback is not None
    return service.fallback.states()


async def until(is_so: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.01)


async def embed(client: httpx.AsyncClient, inputs: Any = "abc", **headers: str) -> httpx.Response:
    return await client.post("/embed", json={"inputs": inputs}, headers=headers)


# -- who is admitted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [FULL, DeadlineExceeded("late"), EngineDown("died")])
def test_an_upstream_with_our_vectors_answers_in_our_place(error: Exception) -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, error, None])
        async with served(engine, upstream) as (service, client):
            assert set(states(service).values()) == {"admitted"}
            fallen, own = await embed(client, ["abc", "de"]), await embed(client)
        name = upstream.url.removeprefix("http://")
        assert fallen.status_code == 200 and np.allclose(fallen.json(), [vector_of("abc"), vector_of("de")], atol=1e-6)
        assert fallen.headers["x-answered-by"] == name and fallen.headers["x-compute-tokens"] == "7"
        assert own.headers["x-answered-by"] == "embedding-model-serving-tei"
        assert upstream.asked_for() == [["abc", "de", CANARY]]

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_another_models_vectors_never_get_through() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL, EngineDown("died")])
        async with served(engine, upstream) as (service, client):
            assert "its vectors are not ours: cosine" in next(iter(states(service).values()))
            full, down = await embed(client), await embed(client)
            about = (await client.get("/info")).json()
        assert full.status_code == 429 and full.headers["retry-after"] == "3"
        assert down.status_code == 503
        assert "not ours" in next(iter(about["fallbacks"].values()))
        assert upstream.asked_for() == [], "it is not even asked"

    with Upstream(of_another_model).running() as upstream:
        asyncio.run(run(upstream))


def test_a_model_that_was_swapped_after_it_was_admitted_does_not_get_through() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL, FULL, FULL])
        async with served(engine, upstream, fallback_pause_s=0.05) as (service, client):
            assert (await embed(client)).status_code == 200
            upstream.vector = of_another_model
            assert (await embed(client)).status_code == 429, "its canary is not ours"
            assert set(states(service).values()) != {"admitted"}
            upstream.vector = ours
            await until(lambda: set(states(service).values()) == {"admitted"})
            assert (await embed(client)).status_code == 200, "compared again, and admitted again"

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        (lambda text: ours(text)[:7], "7 dimensions, ours 8"),
        (lambda text: 2 * ours(text), "another length"),
        (lambda text: ours(text) + 0.02 * np.eye(8)[0], "not ours"),
        (lambda text: ours(text[:8] if len(text) > MAX_LENGTH else text), "not ours"),
        (lambda text: 0 * ours(text), "zero"),
        (lambda text: ours(text) * np.nan, "not finite"),
    ],
)
def test_what_is_not_our_vector_space_is_refused(vector: Vector, reason: str) -> None:
    async def run(upstream: Upstream) -> None:
        async with served(HandEngine(), upstream) as (service, _):
            assert reason in next(iter(states(service).values()))

    with Upstream(vector).running() as upstream:
        asyncio.run(run(upstream))


def test_half_precision_of_the_same_model_is_the_same_space() -> None:
    own = np.stack([ours(text) for text in PROBES])
    assert unlike(own.astype(np.float16).astype(np.float32), own) == ""


def test_openai_style_upstreams_are_asked_in_their_way() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL, FULL])
        there = {"url": f"{upstream.url}/v1", "api": "openai", "model": "m", "api_key": "their-secret", "name": "other"}
        async with served(engine, there) as (_, client):
            fallen = await embed(client)
            strict = await client.post("/embed", json={"inputs": "abc", "truncate": False})
        assert fallen.headers["x-answered-by"] == "other" and fallen.headers["x-compute-tokens"] == "11"
        assert np.allclose(fallen.json(), [vector_of("abc")], atol=1e-6), "rows are taken by their index"
        path, headers, _ = upstream.requests[-1]
        assert path == "/v1/embeddings" and headers["authorization"] == "Bearer their-secret"
        assert strict.status_code == 429, "OpenAI's route cannot be told to refuse long texts"

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_prompts_are_put_before_texts_here() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL])
        async with served(engine, upstream) as (_, client):
            await client.post("/embed", json={"inputs": "abc", "prompt_name": "query"})
        assert upstream.asked_for() == [["q abc", CANARY]]

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_more_texts_than_an_upstream_takes_are_sent_in_parts() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL])
        there = {"url": upstream.url, "api": "tei", "max_client_batch_size": 3}
        async with served(engine, there, compared=False) as (service, client):
            await until(lambda: set(states(service).values()) == {"admitted"})
            fallen = await embed(client, ["a", "b", "c", "d", "e"])
        assert np.allclose(fallen.json(), [vector_of(text) for text in "abcde"], atol=1e-6)
        assert max(len(texts) for _, _, texts in upstream.requests) <= 3
        assert upstream.asked_for()[-3:] == [["a", "b", CANARY], ["c", "d", CANARY], ["e", CANARY]]

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


# -- budgets, breakers, loops ----------------------------------------------------------------------------------------


def test_an_upstream_that_fails_is_left_alone_and_compared_before_it_is_asked_again() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, *[FULL] * 20])
        options = {"fallback_failures": 2, "fallback_pause_s": 0.3}
        async with served(engine, upstream, **options) as (service, client):
            upstream.status = 500
            for _ in range(5):
                assert (await embed(client)).status_code == 429
            assert len(upstream.asked_for()) == 2, "after two failures it is not asked"
            assert "2 failures in a row" in next(iter(states(service).values()))
            upstream.status, upstream.vector = 200, of_another_model
            await until(lambda: "not ours" in next(iter(states(service).values())))
            assert (await embed(client)).status_code == 429, "it came back with another model"
            assert len(upstream.asked_for()) == 2

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_a_text_that_an_upstream_does_not_take_is_not_its_failure() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, *[FULL] * 5])
        async with served(engine, upstream, fallback_failures=1) as (service, client):
            upstream.status = 422
            assert (await embed(client)).status_code == 429
            assert set(states(service).values()) == {"admitted"}

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_an_upstream_that_hangs_costs_its_share_of_the_deadline_and_the_next_one_answers() -> None:
    async def run(slow: Upstream, good: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL])
        async with served(engine, slow, good) as (_, client):
            slow.wait = threading.Event()
            answer = await embed(client, **{"X-Request-Timeout-Ms": "3000"})
            slow.wait.set()
        assert answer.status_code == 200 and answer.headers["x-answered-by"] == good.url.removeprefix("http://")

    with Upstream().running() as slow, Upstream().running() as good:
        asyncio.run(run(slow, good))


def test_our_own_attempt_leaves_time_for_the_fallback() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine()
        async with served(engine, upstream) as (_, client):
            await embed(client, **{"X-Request-Timeout-Ms": "20000"})
            assert engine.calls[-1]["left_s"] == pytest.approx(10, abs=2)
        async with served(engine, upstream, fallback_after_ms=500) as (_, client):
            await embed(client)
            assert engine.calls[-1]["left_s"] <= 0.5

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_the_budget_of_requests_is_kept() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, *[FULL] * 20])
        there = {"url": upstream.url, "api": "tei", "max_requests_per_s": 0.001}
        async with served(engine, there) as (_, client):
            statuses = [(await embed(client)).status_code for _ in range(5)]
        assert statuses == [200, 429, 429, 429, 429] and len(upstream.asked_for()) == 1

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_two_servers_that_fall_back_to_each_other_do_not_go_round() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL, FULL])
        async with served(engine, upstream) as (_, client):
            sent_on = await embed(client, **{HOP_HEADER: "1"})
            assert sent_on.status_code == 429 and upstream.asked_for() == []
            assert (await embed(client)).status_code == 200
        assert all(headers[HOP_HEADER] == "1" for _, headers, _ in upstream.requests)

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))


def test_an_upstream_that_is_away_at_the_start_is_admitted_when_it_comes() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]

    async def run() -> None:
        async with served(HandEngine(), {"url": f"http://127.0.0.1:{port}"}, fallback_pause_s=0.05) as (service, _):
            assert "no answer" in next(iter(states(service).values()))
            with Upstream().running(port):
                await until(lambda: set(states(service).values()) == {"admitted"})

    asyncio.run(run())


def test_attempts_are_counted_by_upstream() -> None:
    async def run(upstream: Upstream) -> None:
        engine = HandEngine(raises=[None, FULL, FULL])
        there = {"url": upstream.url, "api": "tei", "name": "other"}
        async with served(engine, there) as (_, client):
            await embed(client)
            upstream.status = 500
            await embed(client)
            text = (await client.get("/metrics")).text
        assert 'embed_corpus_fallback_total{outcome="answered",upstream="other"} 1.0' in text
        assert 'embed_corpus_fallback_total{outcome="failed",upstream="other"} 1.0' in text
        assert 'embed_corpus_fallback_admitted{upstream="other"} 1.0' in text

    with Upstream().running() as upstream:
        asyncio.run(run(upstream))
