"""What a collector gets of a request: one span continued from the caller's, with its stages inside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline.serving.errors import Overloaded
from pipeline.serving.spans import begin_tracing
from tests.conftest import ROOT
from tests.serve import HandEngine, client_of, hand_service
from tests.test_serving_fallback import Upstream, states, until
from tests.test_tracing import PARENT_ID, TRACE_ID, Collector, facts, seconds


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    yield collector
    collector.close()


def traced(*requests: dict[str, Any], engine: HandEngine | None = None, **options: Any) -> list[httpx.Response]:
    """Answers to requests for embeddings; all spans are delivered when it returns."""

    async def run() -> list[httpx.Response]:
        spans = begin_tracing("my-server")
        service = hand_service(engine, spans=spans, access_log=False, **options)
        await service.start()
        try:
            async with client_of(service) as client:
                if service.fallback is not None:
                    await until(lambda: set(states(service).values()) == {"admitted"})
                return [await client.post("/embed", json={"inputs": "secret"}, **request) for request in requests]
        finally:
            await service.stop()

    return asyncio.run(run())


def test_a_request_is_a_span_with_its_stages_continued_from_the_callers(collector: Collector) -> None:
    traced({"headers": {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}})
    [request] = collector.named("POST /embed")
    assert request.trace_id.hex() == TRACE_ID and request.parent_span_id.hex() == PARENT_ID
    stages = {span.name: round(seconds(span), 4) for span in collector.inside(request)}
    assert stages == {"embed_corpus.tokenize": 0.002, "embed_corpus.queue": 0.001, "embed_corpus.compute": 0.003}
    about = facts(request.attributes)
    assert (about["status"], about["tokens"], about["lane"], about["key"]) == (200, 6, "query", "everybody")
    assert collector.resource["service.name"] == "my-server"
    assert "secret" not in str(collector.received)


def test_only_what_the_server_failed_at_is_an_error(collector: Collector) -> None:
    engine = HandEngine(raises=[Overloaded(1, "full"), RuntimeError("ours")])
    traced({}, {}, engine=engine)
    codes = {facts(span.attributes)["status"]: span.status.code for span in collector.named("POST /embed")}
    assert codes == {429: 0, 500: 2}


def test_a_fallback_continues_the_trace_in_the_other_server(collector: Collector) -> None:
    with Upstream().running() as upstream:
        engine = HandEngine(raises=[None, Overloaded(1, "full")])
        traced({}, engine=engine, fallbacks=[{"url": upstream.url, "api": "tei"}])
    [request] = collector.named("POST /embed")
    [stage] = collector.inside(request)
    assert stage.name == "embed_corpus.fallback" and seconds(stage) > 0
    _, headers, _ = upstream.requests[-1]
    assert headers["traceparent"].startswith(f"00-{request.trace_id.hex()}-{request.span_id.hex()}-")


def test_what_cannot_be_exported_is_a_warning_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nonsense")
    spans = begin_tracing("x")
    assert "nonsense" in spans.warning and spans.begin("POST /embed", {}) is None
    spans.end(None, {})
    spans.close()


def test_without_the_variables_nothing_of_it_is_imported() -> None:
    code = "import sys, pipeline.serving.app, pipeline.serving.spans as s; s.begin_tracing('x')\n"
    code += "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
