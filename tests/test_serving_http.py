"""The HTTP side of ``serve``: routes, limits, errors, keys, what is logged and counted; and whole servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.serving.access_log import AccessLog
from pipeline.serving.app import build_app
from pipeline.serving.errors import DeadlineExceeded, EngineDown, NotEmbeddable, Overloaded
from tests.conftest import RunCommand, write_shard
from tests.serve import HandEngine, Server, client_of, hand_service, running_server, stand_in_run, wait_until
from tests.stand_in import DIM, MAX_LENGTH, vector_of


def ask(
    *requests: tuple[str, Any], engine: HandEngine | None = None, headers: dict[str, str] | None = None, **options: Any
) -> list[httpx.Response]:
    """The answers to requests, (path, body): a GET where there is no body."""

    async def run() -> list[httpx.Response]:
        async with client_of(hand_service(engine, **options)) as client:
            return [
                await client.request("GET" if body is None else "POST", path, json=body, headers=headers)
                for path, body in requests
            ]

    return asyncio.run(run())


def near(answer: Any, texts: list[str]) -> bool:
    return bool(np.allclose(answer, [vector_of(text) for text in texts], atol=1e-6))


# -- TEI -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embed", "/"])
def test_embed_answers_a_list_for_a_text_and_for_a_list(path: str) -> None:
    one, several = ask((path, {"inputs": "abc"}), (path, {"inputs": ["abc", "b", "zz9"]}))
    assert one.status_code == several.status_code == 200
    assert near(one.json(), ["abc"]) and near(several.json(), ["abc", "b", "zz9"])
    assert one.headers["x-compute-tokens"] == "3" and several.headers["x-compute-tokens"] == "7"
    assert one.headers["x-answered-by"] == "embedding-model-serving-tei"
    assert "compute;dur=3.00" in one.headers["server-timing"]


def test_a_float_survives_json_exactly() -> None:
    (answer,) = ask(("/embed", {"inputs": "abc"}))
    assert np.array_equal(np.array(answer.json(), dtype=np.float32)[0], vector_of("abc"))


def test_no_prompt_is_put_before_a_text_unless_it_is_named() -> None:
    engine = HandEngine()
    names = [None, "query", "document", "clustering"]
    bodies = [{"inputs": "abc", **({"prompt_name": name} if name else {})} for name in names]
    answers = ask(*(("/embed", body) for body in bodies), engine=engine)
    assert [call["prompt"] for call in engine.calls] == ["", "q ", "d ", "c "]
    assert near(answers[2].json(), ["d abc"])
    (unknown,) = ask(("/embed", {"inputs": "abc", "prompt_name": "qeury"}))
    assert unknown.status_code == 422 and "did you mean 'query'?" in unknown.json()["error"]


def test_one_text_takes_the_query_lane_and_a_list_the_bulk_lane() -> None:
    engine = HandEngine()
    ask(("/embed", {"inputs": "a"}), ("/embed", {"inputs": ["a"]}), ("/embed", {"inputs": ["a", "b"]}), engine=engine)
    assert [call["lane"] for call in engine.calls] == ["query", "query", "bulk"]


LONG = "a" * (MAX_LENGTH + 10)


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
def test_truncate_means_the_same_for_a_text_and_for_a_list_on_each_route(path: str) -> None:
    name = "inputs" if path == "/embed" else "input"

    def bodies(truncate: bool | None) -> list[tuple[str, Any]]:
        extra = {} if truncate is None else {"truncate": truncate}
        return [(path, {name: LONG, **extra}), (path, {name: [LONG], **extra}), (path, {name: ["b", LONG], **extra})]

    for truncate in (True, None):
        answers = ask(*bodies(truncate))
        assert [answer.status_code for answer in answers] == [200] * 3
        found = [answer.json() for answer in answers]
        rows = found if path == "/embed" else [[row["embedding"] for row in each["data"]] for each in found]
        assert rows[0] == rows[1] and rows[0][0] == rows[2][1]
    for answer in [*ask(*bodies(False)), *ask(*bodies(None), auto_truncate=False)]:
        assert answer.status_code == 413 and "the limit is 32" in answer.text


def test_cutting_on_the_left_is_refused_only_where_something_would_be_cut() -> None:
    short, long = ask(*(("/embed", {"inputs": text, "truncation_direction": "left"}) for text in ("abc", LONG)))
    assert short.status_code == 200 and near(short.json(), ["abc"])
    assert long.status_code == 422 and "cuts on the right only" in long.json()["error"]


def test_dimensions_are_cut_and_renormalised() -> None:
    cut, whole, none, many = ask(*(("/embed", {"inputs": "abc", "dimensions": n}) for n in (3, DIM, 0, DIM + 1)))
    head = vector_of("abc")[:3]
    assert np.allclose(cut.json(), [head / np.linalg.norm(head)], atol=1e-6)
    assert near(whole.json(), ["abc"])
    assert none.status_code == many.status_code == 422 and "expected 1 to 8" in many.json()["error"]


def test_normalize_never_lies_about_the_vectors() -> None:
    normalised = ask(*(("/embed", {"inputs": "abc", "normalize": flag}) for flag in (True, None, False)))
    assert near(normalised[0].json(), ["abc"]) and near(normalised[1].json(), ["abc"])
    assert normalised[2].status_code == 422
    longer = [("/embed", {"inputs": "abc", "normalize": flag}) for flag in (True, None, False)]
    sizes = [np.linalg.norm(answer.json()) for answer in ask(*longer, engine=HandEngine(scale=2.0))]
    assert sizes == pytest.approx([1, 2, 2], abs=1e-5)


EMPTY_AND_BROKEN = [
    ({"inputs": []}, 400),
    ({"inputs": ""}, 200),
    ({"inputs": ["a", ""]}, 200),
    ({}, 422),
    ({"inputs": None}, 422),
    ({"inputs": ["a", None]}, 422),
    ({"inputs": {"a": 1}}, 422),
    ({"inputs": [[101, 102]]}, 422),
    ([], 422),
]


def test_empty_and_broken_input_is_a_4xx_with_a_message_and_the_server_goes_on() -> None:
    answers = ask(*(("/embed", body) for body, _ in EMPTY_AND_BROKEN), ("/embed", {"inputs": "a"}))
    assert [answer.status_code for answer in answers] == [*(status for _, status in EMPTY_AND_BROKEN), 200]
    for answer in answers:
        if answer.status_code != 200:
            assert answer.json()["error"] and set(answer.json()) == {"error", "error_type"}
    assert "token ids" in answers[7].json()["error"]


@pytest.mark.parametrize("content", [b"", b'{"inputs": ', b"\xff\xfe", b"a" * 100])
def test_a_body_that_is_no_json_is_422(content: bytes) -> None:
    async def run() -> httpx.Response:
        async with client_of(hand_service()) as client:
            return await client.post("/embed", content=content, headers={"content-type": "application/json"})

    answer = asyncio.run(run())
    assert answer.status_code == 422 and answer.json()["error"].startswith("the body is not JSON")


def test_batches_and_bodies_above_the_limit_are_413() -> None:
    texts = ["a"] * 4
    most, more, big = ask(
        ("/embed", {"inputs": texts}),
        ("/embed", {"inputs": [*texts, "a"]}),
        ("/embed", {"inputs": "a" * 2_000}),
        max_client_batch_size=4,
        max_body_bytes=1_500,
    )
    assert most.status_code == 200
    assert more.status_code == 413
    assert more.json() == {"error": "batch size 5 > maximum allowed batch size 4", "error_type": "Validation"}
    assert big.status_code == 413 and big.headers["connection"] == "close"


def test_a_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    sent = 0

    async def run() -> httpx.Response:
        async def endless() -> Any:
            nonlocal sent
            while sent < 100_000_000:
                sent += 1_000
                yield b"x" * 1_000

        async with client_of(hand_service(max_body_bytes=10_000)) as client:
            return await client.post("/embed", content=endless(), headers={"content-type": "application/json"})

    assert asyncio.run(run()).status_code == 413
    assert sent <= 12_000


def test_what_a_foreign_web_page_may_send_is_refused() -> None:
    async def run() -> httpx.Response:
        async with client_of(hand_service()) as client:
            headers = {"content-type": "text/plain", "origin": "http://evil.example"}
            return await client.post("/embed", content=b'{"inputs": "a"}', headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 415
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded(2.2, "the queue is full"), 429, "Overloaded"),
        (DeadlineExceeded("too late"), 504, "Timeout"),
        (EngineDown("it died"), 503, "Unhealthy"),
        (NotEmbeddable(0, "has no token"), 422, "Tokenizer"),
        (RuntimeError("secret text"), 500, "Backend"),
    ],
)
def test_each_failure_has_its_status_and_shape(error: Exception, status: int, kind: str) -> None:
    engine = HandEngine(raises=[error, error, None])
    tei, openai, after = ask(
        ("/embed", {"inputs": "a"}), ("/v1/embeddings", {"input": "a"}), ("/embed", {"inputs": "a"}), engine=engine
    )
    assert tei.status_code == status and tei.json()["error_type"] == kind
    assert openai.status_code == (400 if status == 422 else status)
    assert set(openai.json()["error"]) == {"message", "type", "param", "code"}
    assert after.status_code == 200
    assert ("retry-after" in tei.headers) == (status == 429)
    assert tei.headers.get("retry-after", "3") == "3", "never sooner than the engine said"
    assert "secret" not in tei.text


def test_tokenize_shows_tokens_with_their_places() -> None:
    whole, bare = ask(
        ("/tokenize", {"inputs": "ab", "prompt_name": "query"}),
        ("/tokenize", {"inputs": ["ab", "c"], "add_special_tokens": False}),
    )
    assert [token["text"] for token in whole.json()[0]] == ["[CLS]", "q", " ", "a", "b"]
    assert whole.json()[0][0] == {"id": 1, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert [[token["text"] for token in row] for row in bare.json()] == [["a", "b"], ["c"]]


def test_info_has_teis_fields_and_ours() -> None:
    (answer,) = ask(("/info", None))
    about = answer.json()
    tei = ("model_id", "model_sha", "model_dtype", "model_type", "max_input_length", "max_client_batch_size", "version")
    assert set(tei) <= set(about)
    assert about["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (about["dimensions"], about["fingerprint"], about["lane"]) == (DIM, "f1", "hand")


def test_health_follows_the_engine() -> None:
    up, down = ask(("/health", None)), ask(("/health", None), engine=HandEngine(is_up=False))
    assert up[0].status_code == 200
    assert down[0].status_code == 503 and down[0].json() == {"error": "unhealthy", "error_type": "Unhealthy"}


def test_unknown_paths_and_methods_are_json_too() -> None:
    unknown, wrong = ask(("/nothing", None), ("/embed", None))
    assert unknown.status_code == 404 and "/nothing" in unknown.json()["error"]
    assert wrong.status_code == 405 and "POST" in wrong.headers["allow"]


# -- OpenAI ----------------------------------------------------------------------------------------------------------


def test_openai_embeddings_as_floats_and_as_base64() -> None:
    floats, packed = ask(
        ("/v1/embeddings", {"input": ["abc", "z"], "model": "any"}),
        ("/v1/embeddings", {"input": ["abc", "z"], "encoding_format": "base64"}),
    )
    document = floats.json()
    assert (document["object"], document["model"]) == ("list", "hand-made")
    assert document["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert [row["index"] for row in document["data"]] == [0, 1]
    assert near([row["embedding"] for row in document["data"]], ["abc", "z"])
    decoded = [np.frombuffer(base64.b64decode(row["embedding"]), dtype="<f4") for row in packed.json()["data"]]
    assert near(decoded, ["abc", "z"])


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"input": []}, 400, "empty"),
        ({"input": [1, 2, 3]}, 400, "token ids"),
        ({"input": [[1, 2]]}, 400, "check_embedding_ctx_length=False"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 99}, 400, "expected 1 to 8"),
        ({}, 400, "required"),
        ({"input": ["a"] * 33}, 413, "batch size 33"),
    ],
)
def test_openai_refusals_have_openais_shape(body: Any, status: int, word: str) -> None:
    (answer,) = ask(("/v1/embeddings", body))
    error = answer.json()["error"]
    assert answer.status_code == status and word in error["message"]
    assert error["type"] == "invalid_request_error"


def test_models_names_the_one_model() -> None:
    (answer,) = ask(("/v1/models", None))
    assert [model["id"] for model in answer.json()["data"]] == ["hand-made"]


# -- who may ask, and until when -------------------------------------------------------------------------------------

KEYS = {"alice": "alice-secret-1", "batch": "batch-secret-2"}
CLOSED = ["/embed", "/v1/embeddings", "/search", "/tokenize"]


def test_without_a_valid_key_nothing_but_health_and_pages_is_answered() -> None:
    for headers in ({}, {"authorization": "Bearer alice-secret-2"}, {"authorization": "Basic alice-secret-1"}):
        engine = HandEngine()
        posts = ask(*((path, {"inputs": "a"}) for path in CLOSED), engine=engine, headers=headers, api_keys=KEYS)
        gets = ask(*((path, None) for path in ("/info", "/metrics", "/v1/models")), headers=headers, api_keys=KEYS)
        assert {answer.status_code for answer in [*posts, *gets]} == {401}
        assert posts[0].headers["www-authenticate"] == "Bearer" and not engine.calls
        free = ask(("/health", None), ("/", None), ("/docs", None), ("/openapi.json", None), api_keys=KEYS)
        assert {answer.status_code for answer in free} == {200}


def test_a_key_counts_for_its_owner_and_is_never_shown() -> None:
    async def run() -> tuple[str, str]:
        stream = io.StringIO()
        service = hand_service(api_keys=KEYS, price_per_million_tokens=2.0, log=AccessLog(stream=stream))
        async with client_of(service) as client:
            for name, texts in (("alice", ["abc"]), ("batch", ["abc", "de"]), ("batch", ["f"])):
                headers = {"authorization": f"Bearer {KEYS[name]}"}
                assert (await client.post("/embed", json={"inputs": texts}, headers=headers)).status_code == 200
            headers = {"authorization": f"Bearer {KEYS['alice']}"}
            metrics = (await client.get("/metrics", headers=headers)).text
        service.log.flush()
        return metrics, stream.getvalue()

    metrics, log = asyncio.run(run())
    assert 'embed_corpus_tokens_total{key="alice"} 3.0' in metrics
    assert 'embed_corpus_tokens_total{key="batch"} 6.0' in metrics
    assert 'embed_corpus_cost_total{key="batch"} 1.2e-05' in metrics
    assert [json.loads(line)["key"] for line in log.splitlines()] == ["alice", "batch", "batch"]
    for secret in KEYS.values():
        assert secret not in metrics + log


def test_the_deadline_is_the_servers_or_the_requests() -> None:
    engine = HandEngine()
    ask(("/embed", {"inputs": "a"}), engine=engine, request_timeout_ms=30_000)
    ask(("/embed", {"inputs": "a"}), engine=engine, headers={"X-Request-Timeout-Ms": "2000"})
    ask(("/embed", {"inputs": "a"}), engine=engine, headers={"X-Request-Timeout-Ms": "99999999"})
    assert [call["left_s"] for call in engine.calls] == pytest.approx([30, 2, 60], abs=1.5)
    for wrong in ("soon", "-1", "0", "nan", "inf"):
        (answer,) = ask(("/embed", {"inputs": "a"}), headers={"X-Request-Timeout-Ms": wrong})
        assert answer.status_code == 422 and "milliseconds" in answer.json()["error"]


# -- what is seen ----------------------------------------------------------------------------------------------------


def test_a_request_has_one_log_line_without_its_text() -> None:
    stream = io.StringIO()

    async def run() -> None:
        service = hand_service(log=AccessLog(stream=stream))
        async with client_of(service) as client:
            await client.post("/embed", json={"inputs": "geheim"}, headers={"x-request-id": "abc-1"})
            await client.post("/embed", json={"inputs": ["geheim", 3]}, headers={"x-request-id": "two\twords"})
            await client.get("/health")
        service.log.flush()

    asyncio.run(run())
    one, two = map(json.loads, stream.getvalue().splitlines())
    assert (one["request_id"], one["route"], one["status"], one["tokens"]) == ("abc-1", "/embed", 200, 6)
    assert one["ms"]["compute"] == 3.0 and one["ms"]["total"] > 0
    assert (two["status"], two["reason"]) == (422, "invalid") and two["request_id"] != "two\twords"
    assert "geheim" not in stream.getvalue()


def test_a_log_nobody_reads_neither_grows_nor_blocks() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    for number in range(10_500):
        log.request(number=number)
    log.flush()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10_001 and json.loads(lines[-1]) == {"level": "warning", "event": "log_dropped", "lines": 500}
    stream.close()
    log.event("later")
    log.flush()


def test_metrics_count_by_route_status_stage_and_reason() -> None:
    engine = HandEngine(raises=[None, Overloaded(1, "full")])
    *_, metrics = ask(
        ("/embed", {"inputs": "a"}),
        ("/embed", {"inputs": "a"}),
        ("/embed", {"inputs": []}),
        ("/some/path/1", None),
        ("/some/path/2", None),
        ("/metrics", None),
        engine=engine,
    )
    text = metrics.text
    assert 'embed_corpus_requests_total{route="/embed",status="200"} 1.0' in text
    assert 'embed_corpus_requests_total{route="other",status="404"} 2.0' in text and "/some/path" not in text
    assert 'embed_corpus_rejected_total{reason="overloaded"} 1.0' in text
    assert 'embed_corpus_stage_seconds_count{stage="compute"} 1.0' in text
    assert "embed_corpus_queue_tokens 3.0" in text and "embed_corpus_batch_fill 0.5" in text


def test_openapi_names_every_route_and_loads_nothing() -> None:
    document, docs, page = ask(("/openapi.json", None), ("/docs", None), ("/", None))
    paths = document.json()["paths"]
    assert {"/embed", "/search", "/v1/embeddings", "/tokenize", "/info", "/metrics", "/health"} <= set(paths)
    schema = paths["/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert "inputs" in document.json()["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
    for answer in (docs, page):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text and "https://" not in answer.text and "innerHTML" not in answer.text


def test_every_route_of_the_application_is_described() -> None:
    app = build_app(hand_service())
    paths = {route.path for route in app.routes}  # type: ignore[attr-defined]
    (document,) = ask(("/openapi.json", None))
    assert paths - set(document.json()["paths"]) == {"/", "/embeddings", "/ping", "/docs", "/openapi.json"}


# -- a client that hangs up ------------------------------------------------------------------------------------------


def talk(app: Any, message_after_body: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[list[Any], Any]:
    """Send one request to an ASGI application by hand; what it sent back."""
    sent: list[Any] = []
    first = [{"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}]

    async def receive() -> Any:
        return first.pop() if first else await message_after_body()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": []}
    return sent, app(scope, receive, send)


def test_the_work_of_a_client_that_hung_up_is_dropped() -> None:
    async def run() -> None:
        engine = HandEngine(gate=asyncio.Event())
        service = hand_service(engine)

        async def hang_up() -> dict[str, Any]:
            while not engine.calls:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        sent, request = talk(build_app(service), hang_up)
        answering = asyncio.create_task(request)
        async with asyncio.timeout(10):
            while not engine.cancelled:
                await asyncio.sleep(0.01)
        await answering
        assert not sent
        assert 'rejected_total{reason="cancelled"} 1.0' in service.metrics.text().decode()

    asyncio.run(run())


# -- a server of its own process -------------------------------------------------------------------------------------

WORDS = [f"word number {number}" for number in range(60)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Path:
    """A folder with input ``in`` and its finished output ``out``, vectors by the stand-in."""
    folder = tmp_path_factory.mktemp("served")
    write_shard(folder / "in" / "a.parquet", WORDS)
    stand_in_run(folder / "in", folder / "out", model_dir)
    return folder


@pytest.fixture(scope="module")
def server(corpus: Path) -> Iterator[Server]:
    config = corpus / "serve.yaml"
    config.write_text("index_poll_s: 0.2\nmax-body-bytes: 100000\nquery-lane: torch\n")
    with running_server(corpus / "log", str(corpus / "out"), "--config", str(config)) as running:
        yield running


def test_served_vectors_are_the_batchs(server: Server, corpus: Path) -> None:
    table = pq.read_table(corpus / "out" / "embeddings")
    stored = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(table), DIM)
    body = {"inputs": table["text"].to_pylist()[:32], "prompt_name": "document"}
    answer = httpx.post(f"{server.url}/embed", json=body, timeout=60)
    assert np.allclose(answer.json(), stored[:32], atol=1e-6)


def test_search_finds_by_text_by_vector_and_by_several(server: Server) -> None:
    def search(**body: Any) -> Any:
        answer = httpx.post(f"{server.url}/search", json={"k": 2, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return [[hit["text"] for hit in hits] for hits in answer.json()["results"]]

    vector = [float(x) for x in vector_of(WORDS[7])]
    assert search(query=WORDS[7])[0][0] == WORDS[7]
    assert search(query=vector)[0][0] == WORDS[7]
    assert [hits[0] for hits in search(query=[WORDS[3], WORDS[59]])] == [WORDS[3], WORDS[59]]
    assert [hits[0] for hits in search(query=[vector, vector])] == [WORDS[7]] * 2
    assert sorted(search(query="word", filter="text in ('word number 1', 'word number 2')")[0]) == WORDS[1:3]
    assert search(query="word", filter="id = 'a-5'")[0] == [WORDS[5]]


def test_a_search_tells_what_it_took_and_of_which_generation(server: Server, corpus: Path) -> None:
    answer = httpx.post(f"{server.url}/search", json={"query": "word", "k": 1}, timeout=60)
    document = answer.json()
    name = json.loads((corpus / "out/index/index.json").read_text())["index_file"]
    assert document["generation"] in name and document["warnings"] == []
    assert {"tokenize", "queue", "compute", "search"} == set(document["milliseconds"])
    hit = document["results"][0][0]
    assert list(hit) == ["query", "rank", "score", "id", "shard", "row", "text"], "as `search --json` prints it"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"query": "x", "k": 0}, "k:"),
        ({"query": "x", "k": 100_000}, "at most 1000"),
        ({"query": [0.5, 0.5]}, "a vector of 2 dimensions, the index has 8"),
        ({"query": [["a"]]}, "expected numbers"),
        ({"query": ["a", 1.0]}, "expected texts only"),
        ({"query": "x", "columns": ["nope"]}, "no column 'nope'"),
        ({"query": "x", "filter": "nope = 1"}, "no such column"),
        ({"query": "x", "filter": "text = 5"}, "text is string"),
        ({"query": "x", "filter": {"text": "a"}}, "filter: "),
        ({"query": "x", "colums": []}, "colums"),
        ({"query": True}, "query"),
    ],
)
def test_a_search_that_does_not_fit_says_why(server: Server, body: Any, word: str) -> None:
    answer = httpx.post(f"{server.url}/search", json=body, timeout=60)
    assert answer.status_code == 422 and word in answer.json()["error"]


def test_an_empty_search_is_400(server: Server) -> None:
    assert httpx.post(f"{server.url}/search", json={"query": []}, timeout=60).status_code == 400


def test_a_search_process_that_dies_is_replaced(server: Server) -> None:
    import psutil

    def child() -> Any:
        children = psutil.Process(server.process.pid).children()
        return next((each for each in children if "pipeline.serving.search_process" in each.cmdline()), None)

    before = child()
    before.kill()
    server.wait_for("search_died")
    wait_until(lambda: (found := child()) is not None and found.pid != before.pid, 60, "another search process")
    wait_until(
        lambda: httpx.post(f"{server.url}/search", json={"query": "word"}, timeout=60).status_code == 200, 60, "hits"
    )
    assert httpx.post(f"{server.url}/embed", json={"inputs": "a"}, timeout=60).status_code == 200


def test_a_large_body_is_refused_before_it_is_read(server: Server) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000000\r\n\r\n")
        answer = b""
        while chunk := connection.recv(65_536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413 ") and b"5000000000 bytes, the limit is 100000" in answer


def test_nothing_that_was_asked_is_in_the_log(server: Server) -> None:
    httpx.post(f"{server.url}/search", json={"query": "xyzzy plugh"}, headers={"x-request-id": "last-one"}, timeout=60)
    wait_until(lambda: "last-one" in server.log.read_text(), 30, "the log line")
    text = server.log.read_text(encoding="utf-8")
    assert "xyzzy" not in text and "word number" not in text


def test_a_new_generation_is_picked_up_without_dropping_a_request(corpus: Path, model_dir: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "in" / "a.parquet", WORDS)
    stand_in_run(tmp_path / "in", tmp_path / "out", model_dir)
    (tmp_path / "serve.yaml").write_text("index_poll_s: 0.1\nquery_lane: torch\n")
    with running_server(tmp_path / "log", str(tmp_path / "out"), "--config", str(tmp_path / "serve.yaml")) as server:
        stop, statuses, generations = threading.Event(), [], set()

        def keep_asking() -> None:
            with httpx.Client(timeout=60) as client:
                while not stop.is_set():
                    answer = client.post(f"{server.url}/search", json={"query": "word", "k": 3})
                    statuses.append((answer.status_code, len(answer.json().get("results", [[]])[0])))
                    generations.add(answer.json().get("generation"))

        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            # One shard is embedded again meanwhile, one is new.
            write_shard(tmp_path / "in" / "a.parquet", [f"changed {word}" for word in WORDS])
            write_shard(tmp_path / "in" / "b.parquet", ["entirely new"])
            stand_in_run(tmp_path / "in", tmp_path / "out", model_dir)
            server.wait_for("index", count=2)
            wait_until(lambda: len(generations) == 2, 60, "hits of the new generation")
        finally:
            stop.set()
            asking.join()
        assert set(statuses) == {(200, 3)}, "nothing was dropped, and no hit was missing"
        body = {"query": "entirely new", "k": 1}
        assert httpx.post(f"{server.url}/search", json=body, timeout=60).json()["results"][0][0]["id"] == "b-0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_what_is_in_flight(corpus: Path, tmp_path: Path, number: int) -> None:
    # A text takes two seconds here, so that one is in flight when the signal comes.
    environ = {"STAND_IN_SECONDS": "2"}
    with running_server(tmp_path, str(corpus / "out"), "--query-lane", "torch", environ=environ) as server:
        answers: list[int] = []

        def embed() -> None:
            answers.append(httpx.post(f"{server.url}/embed", json={"inputs": "a"}, timeout=60).status_code)

        asking = threading.Thread(target=embed)
        asking.start()
        with httpx.Client() as client:
            wait_until(
                lambda: "embed_corpus_batches_in_flight 1.0" in client.get(f"{server.url}/metrics").text, 60, "a batch"
            )
        server.process.send_signal(number)
        asking.join()
        assert server.process.wait(60) == 0
        assert answers == [200]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_killed_server_leaves_no_process_behind(corpus: Path, tmp_path: Path) -> None:
    import psutil

    with running_server(tmp_path, str(corpus / "out"), "--query-lane", "torch") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert any("pipeline.serving.search_process" in child.cmdline() for child in children)
        server.process.kill()
        server.process.wait(60)
        wait_until(lambda: not any(child.is_running() for child in children), 60, "all processes to end")


# -- the command -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_one_line_and_78(command: RunCommand, corpus: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done: list[subprocess.CompletedProcess[str]] = [
            command("serve", corpus / "out", "--port", port),
            command("serve", tmp_path / "nothing", "--port", 0),
            command("serve", corpus / "out", "--host", "no.such.host.invalid"),
        ]
    words = [f"--port {port}: cannot listen", "no run.json here", "--host no.such.host.invalid"]
    for each, word in zip(done, words, strict=True):
        assert each.returncode == 78 and word in each.stderr
        assert each.stderr.count("\n") == 1 and "Traceback" not in each.stderr


def test_an_output_without_an_index_embeds_and_says_what_is_missing(
    corpus: Path, model_dir: str, tmp_path: Path
) -> None:
    stand_in_run(corpus / "in", tmp_path / "out", model_dir, index="none")
    with running_server(tmp_path / "log", str(tmp_path / "out"), "--query-lane", "torch") as server:
        assert httpx.post(f"{server.url}/embed", json={"inputs": "a"}, timeout=60).status_code == 200
        answer = httpx.post(f"{server.url}/search", json={"query": "a"}, timeout=60)
        assert answer.status_code == 503 and "run `embed-corpus index" in answer.json()["error"]
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_serving_loads_neither_torch_nor_faiss_into_the_server(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "faiss" not in maps


# -- what is kept of the files ---------------------------------------------------------------------------------------


def test_row_groups_are_read_once_and_kept_within_their_bytes(tmp_path: Path) -> None:
    import pyarrow as pa

    from pipeline.serving.search_process import RowGroups

    table = pa.table({"a": range(100), "b": [f"text {number}" for number in range(100)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    opened = 0

    @contextlib.contextmanager
    def open_file() -> Iterator[pq.ParquetFile]:
        nonlocal opened
        opened += 1
        with pq.ParquetFile(tmp_path / "x.parquet") as parquet:
            yield parquet

    rows = np.array([95, 3, 3, 41, 0])
    for size, expected in ((1 << 20, 1), (0, 4), (table.slice(0, 10).nbytes, 4)):
        groups, opened = RowGroups(size), 0
        for _ in range(4):
            found = groups.take("x", open_file, rows, ["b", "a"])
            assert found.to_pylist() == table.take(rows).select(["b", "a"]).to_pylist()
        assert opened == expected
        assert groups._bytes <= max(size, 0)
        groups.forget("x")
        assert groups._bytes == 0


def test_columns_of_a_shard_that_was_embedded_again_are_never_told_of_the_old_vectors(
    tmp_path: Path, model_dir: str
) -> None:
    from pipeline.search import open_index
    from pipeline.serving.search_process import STALE, ServedIndex, search

    def ask_for(text: str, columns: list[str] | None = None) -> Any:
        request = {"k": 1, "columns": columns, "where": None}
        found = search(index, vector_of(text)[None], request)
        return found.to_list()[0][0], found.warnings

    for name in ("a", "b"):
        write_shard(tmp_path / "in" / f"{name}.parquet", [f"{name} {word}" for word in WORDS])
    stand_in_run(tmp_path / "in", tmp_path / "out", model_dir)
    index = open_index(str(tmp_path / "out"), kind=ServedIndex)
    assert isinstance(index, ServedIndex)
    index.keep(1 << 20)
    index._groups.forget(index.info["shards"][1]["sha256"])
    assert ask_for("a word number 7")[0]["text"] == "a word number 7"
    # Both with as many rows as before; the index stays.
    for name in ("a", "b"):
        write_shard(tmp_path / "in" / f"{name}.parquet", [f"{name} word else {word}" for word in WORDS])
    stand_in_run(tmp_path / "in", tmp_path / "out", model_dir, index="none")
    read_before, _ = ask_for("a word number 9")
    assert read_before["text"] == "a word number 9", "kept from before it was replaced"
    hit, warnings = ask_for("b word number 7")
    assert (hit["id"], "text" in hit, warnings) == ("b-7", False, (STALE,))
    index.close()
