"""What a collector gets of a run: the protocol is the real one, over HTTP, on loopback."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pipeline import shards, tracing
from pipeline.config import RunConfig, build_config
from pipeline.pool import Event
from pipeline.progress import Display, JsonDisplay, NoDisplay, PlainDisplay
from pipeline.ranks import Rank
from pipeline.records import Shard
from pipeline.run import run
from pipeline.telemetry import RunReport
from pipeline.tracing import begin, wanted
from tests.conftest import ROOT, STAND_IN, write_shard

REQUESTS = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NEEDED = RunConfig(input=["in"], output="out", model="model")
STAGES = {"wait_for_input", "pack", "encode", "wait_for_writer", "reuse", "other"}


def plain(value: Any) -> Any:
    """An OTLP value as Python has it."""
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


def facts(attributes: Any) -> dict[str, Any]:
    return {each.key.removeprefix("embed_corpus."): plain(each.value) for each in attributes}


class Collector:
    """An OTLP receiver over HTTP that keeps what it is sent."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.received.append(REQUESTS[self.path].FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _parts(self, kind: type, outer: str, middle: str, inner: str) -> list[Any]:
        requests = [each for each in self.received if isinstance(each, kind)]
        groups = [group for request in requests for group in getattr(request, outer)]
        return [each for group in groups for scope in getattr(group, middle) for each in getattr(scope, inner)]

    @property
    def spans(self) -> list[Any]:
        return self._parts(ExportTraceServiceRequest, "resource_spans", "scope_spans", "spans")

    @property
    def logs(self) -> list[Any]:
        return self._parts(ExportLogsServiceRequest, "resource_logs", "scope_logs", "log_records")

    @property
    def resource(self) -> dict[str, Any]:
        [request, *_] = [each for each in self.received if isinstance(each, ExportTraceServiceRequest)]
        return {each.key: plain(each.value) for each in request.resource_spans[0].resource.attributes}

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def inside(self, span: Any) -> list[Any]:
        return [each for each in self.spans if each.parent_span_id == span.span_id]

    def totals(self) -> dict[str, float]:
        """The last value of every counter, over all its attributes."""
        return {
            name.removeprefix("embed_corpus."): sum(point.as_int or point.as_double for point in metric.sum.data_points)
            for name, metric in self.metrics.items()
            if metric.WhichOneof("data") == "sum"
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """The last state of each."""
        parts = self._parts(ExportMetricsServiceRequest, "resource_metrics", "scope_metrics", "metrics")
        return {metric.name: metric for metric in parts}


@pytest.fixture(autouse=True)
def untouched_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OTEL_", "TRACE", "AIRFLOW_", "KUBERNETES_")):
            monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
    yield made
    made.close()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(3):
        texts = [f"text {row} of {number}" * (1 + row % 4) for row in range(40)]
        write_shard(tmp_path / "in" / f"part-{number}.parquet", [*texts, None])
    return tmp_path / "in"


def embed(source: Path, output: Path, model: str, display: Display | None = None, **options: Any) -> RunReport:
    given = {"input": str(source), "output": str(output), "model": model, "id_column": "id", "index": "none"}
    config = build_config(None, {**given, "devices": "cpu", **options})
    return run(config, display, stand_in=STAND_IN)


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_spans_records_metrics_and_report_agree(
    collector: Collector, corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS", "0.02")
    report = embed(corpus, tmp_path / "out", model_dir, max_batch_tokens=200, price_per_hour=3.6)
    assert report.warnings == []
    [root] = collector.named("embed_corpus.run")
    spans = {facts(span.attributes)["shard.key"]: span for span in collector.named("embed_corpus.shard")}
    records = {record["shard"]["key"]: record for record in report.shards}
    assert set(spans) == set(records) == {"part-0", "part-1", "part-2"}
    for key, span in spans.items():
        told, record = facts(span.attributes), records[key]
        assert span.parent_span_id == root.span_id
        assert told["tokens"] == record["counts"]["tokens"] > 0
        assert (told["rows"], told["vectors"], told["quarantined"]) == (41, 40, 1)
        assert told["truncated"] == record["counts"]["truncated_texts"] > 0
        assert (told["device"], told["device_idle"]) == ("cpu", record["device_idle"])
        assert told["busy_seconds.tokenize"] == record["busy_seconds"]["tokenize"]
        stages = {each.name: each for each in collector.inside(span)}
        assert {"read", "tokenize", "encode", "write"} <= set(stages)
        exclusive = [each for each in stages.values() if facts(each.attributes)["stage.exclusive"]]
        assert {each.name for each in exclusive} <= STAGES
        assert seconds(span) == pytest.approx(record["seconds"]["wall"], abs=1e-3)
        assert sum(map(seconds, exclusive)) == pytest.approx(seconds(span), rel=0.05)
        ordered = sorted(exclusive, key=lambda each: each.start_time_unix_nano)
        assert ordered[0].start_time_unix_nano == span.start_time_unix_nano
        for before, after in itertools.pairwise(ordered):
            assert abs(after.start_time_unix_nano - before.end_time_unix_nano) <= 1000
        for each in stages.values():
            assert each.start_time_unix_nano >= span.start_time_unix_nano
            assert each.end_time_unix_nano <= span.end_time_unix_nano + 1_000_000  # the record's rounding
    total = facts(root.attributes)
    assert total["tokens"] == report.counts.tokens == sum(facts(s.attributes)["tokens"] for s in spans.values())
    assert (total["shards.done"], total["exit_code"]) == (3, 0)
    counters = collector.totals()
    assert counters.pop("cost") == pytest.approx(report.cost)
    assert counters == {
        "tokens": report.counts.tokens,
        "texts": report.counts.texts,
        "rows": report.counts.rows,
        "truncated": report.counts.truncated_texts,
        "quarantined": 3,
        "shards": 3,
    }
    [idle] = collector.metrics["embed_corpus.device.idle"].gauge.data_points
    assert idle.as_double == report.shards[-1]["device_idle"]
    [duration] = collector.metrics["embed_corpus.shard.duration"].histogram.data_points
    assert duration.count == 3
    assert duration.sum == pytest.approx(sum(record["seconds"]["wall"] for record in report.shards))
    [load] = collector.named("embed_corpus.load")
    assert load.end_time_unix_nano <= min(span.end_time_unix_nano for span in spans.values())


def test_a_trace_that_was_begun_elsewhere_is_continued(
    collector: Collector, corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE_ID}-{PARENT_ID}-01")
    monkeypatch.setenv("TRACESTATE", "vendor=1")
    stream = io.StringIO()
    embed(corpus, tmp_path / "out", model_dir, PlainDisplay(stream))
    [root] = collector.named("embed_corpus.run")
    assert (root.parent_span_id.hex(), root.trace_state) == (PARENT_ID, "vendor=1")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    lines = {plain(log.body): log for log in collector.logs}
    assert {log.trace_id.hex() for log in lines.values()} == {TRACE_ID}
    assert {log.span_id for log in lines.values()} == {root.span_id}
    for line in stream.getvalue().splitlines()[1:]:
        if " vectors, " in line:
            assert line[9:] in lines  # without its time
    assert any("model ready" in line for line in lines)


def test_a_trace_that_is_not_sampled_is_not_exported(
    collector: Collector, corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE_ID}-{PARENT_ID}-00")
    report = embed(corpus, tmp_path / "out", model_dir)
    assert collector.spans == []
    assert collector.totals()["tokens"] == report.counts.tokens


def test_who_exports_is_told_and_the_variables_win(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "POD_NAME": "embed-3-x7f",
        "POD_NAMESPACE": "batch",
        "JOB_COMPLETION_INDEX": "3",
        "AIRFLOW_CTX_DAG_ID": "nightly",
        "AIRFLOW_CTX_DAG_RUN_ID": "manual__2026-01-01",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=mine,deployment.environment.name=test",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with begin(NEEDED, Rank(3, 8)) as trace:
        trace.end(RunReport("out"))
    resource = collector.resource
    assert resource["service.name"] == "embed-corpus"
    assert (resource["embed_corpus.rank"], resource["embed_corpus.world_size"]) == (3, 8)
    assert (resource["k8s.pod.name"], resource["k8s.namespace.name"]) == ("mine", "batch")
    assert resource["k8s.job.completion_index"] == "3"
    assert (resource["airflow.dag_id"], resource["airflow.run_id"]) == ("nightly", "manual__2026-01-01")
    assert resource["deployment.environment.name"] == "test"


def test_the_service_can_have_a_name_of_its_own(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search-corpus")
    monkeypatch.setenv("JOB_NAME", "a build server's, not a pod's")
    with begin(NEEDED) as trace:
        trace.end(RunReport("out"))
    assert collector.resource["service.name"] == "search-corpus"
    assert "k8s.job.name" not in collector.resource


def test_a_shard_of_parts_is_one_span(
    collector: Collector, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PART_ROWS", 20)
    write_shard(tmp_path / "in" / "large.parquet", [f"row {row}" for row in range(100)], row_group_size=20)
    report = embed(tmp_path / "in", tmp_path / "out", model_dir)
    [span] = collector.named("embed_corpus.shard")
    told = facts(span.attributes)
    assert (told["shard.key"], told["shard.parts"]) == ("large", report.shards[0]["parts"])
    assert told["tokens"] == collector.totals()["tokens"] == report.counts.tokens
    exclusive = [each for each in collector.inside(span) if facts(each.attributes)["stage.exclusive"]]
    assert sum(map(seconds, exclusive)) == pytest.approx(report.shards[0]["seconds"]["wall"], rel=0.05)


def test_what_fails_is_an_error_in_every_signal(
    collector: Collector, corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    (corpus / "part-1.parquet").write_bytes(b"PAR1 damaged PAR1")
    report = embed(corpus, tmp_path / "out", model_dir)
    [failure] = report.failed
    [root] = collector.named("embed_corpus.run")
    assert (root.status.code, root.status.message) == (2, failure.reason)
    [span] = [each for each in collector.named("embed_corpus.shard") if each.status.code == 2]
    assert facts(span.attributes)["error.type"] == "bad"
    [log] = [each for each in collector.logs if each.severity_text == "ERROR"]
    assert plain(log.body) == failure.reason
    assert log.trace_id == root.trace_id
    points = collector.metrics["embed_corpus.shards"].sum.data_points
    assert {facts(point.attributes)["outcome"]: point.as_int for point in points} == {"done": 2, "bad": 1}


def test_a_lost_worker_is_a_retry_and_each_failure_is_told_once(collector: Collector) -> None:
    shard = Shard("a", "a.parquet", 300, 1, 30)
    report = RunReport("out")
    with begin(NEEDED) as trace:
        with trace.display(NoDisplay()).embedding([shard]) as show:
            show(Event("lost", shard, reason="a.parquet: worker on cpu killed; trying again"))
            show(Event("gave up", shard, reason="a.parquet: worker on cpu killed, 3 times"))
        report.add_failure("a.parquet", "gave up", "a.parquet: worker on cpu killed, 3 times")
        report.add_failure("index", "bad", "recall is too low")
        trace.end(report)
    assert collector.totals() == {"retries": 1, "shards": 1}
    [root] = collector.named("embed_corpus.run")
    assert [event.name for event in root.events] == ["embed_corpus.retry"]
    assert len(collector.named("embed_corpus.shard")) == len(collector.named("embed_corpus.index")) == 1
    assert [log.severity_text for log in collector.logs] == ["INFO", "WARN", "ERROR", "ERROR", "INFO"]


def test_the_index_has_a_span_of_its_time(collector: Collector) -> None:
    with begin(NEEDED) as trace:
        start = time.perf_counter()
        trace.index({"factory": "Flat", "ntotal": 7, "recall_at_10": {"value": 1.0}}, start, start + 2.0)
        trace.end(RunReport("out"))
    [span] = collector.named("embed_corpus.index")
    assert seconds(span) == pytest.approx(2.0)
    assert facts(span.attributes) == {"index.factory": "Flat", "index.vectors": 7, "index.recall_at_10": 1.0}


def test_an_interrupted_run_still_has_its_trace(collector: Collector) -> None:
    with pytest.raises(KeyboardInterrupt), begin(NEEDED):
        raise KeyboardInterrupt
    [root] = collector.named("embed_corpus.run")
    assert (root.status.code, root.status.message) == (2, "interrupted")


def test_json_lines_carry_the_trace_id(collector: Collector) -> None:
    stream = io.StringIO()
    with begin(NEEDED, Rank(1, 2)) as trace:
        trace.display(JsonDisplay(stream)).line("checked")
        trace.end(RunReport("out"))
    line = json.loads(stream.getvalue())
    assert (line["rank"], line["trace_id"]) == (1, trace.trace_id)
    assert plain(collector.logs[0].body) == "checked"
    assert collector.logs[0].trace_id.hex() == trace.trace_id


@pytest.fixture(params=["refuses", "is silent"])
def dead_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nobody listens there; or somebody does, and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_an_endpoint_that_does_not_answer_costs_seconds_and_one_warning(
    dead_endpoint: str,
    corpus: Path,
    tmp_path: Path,
    model_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", dead_endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")  # else its threads are still at it in the next tests
    monkeypatch.setattr(tracing, "FLUSH_S", 1.0)
    ended: list[float] = []
    monkeypatch.setattr(tracing._Exported, "_flush", timed(tracing._Exported._flush, ended))
    report = embed(corpus, tmp_path / "out", model_dir)
    assert (report.shards_done, report.exit_code) == (3, 0)
    [warning] = report.warnings
    assert re.match(r"OpenTelemetry: not everything was delivered.*; the run itself is not affected$", warning)
    assert ended[0] < 2.0
    assert capfd.readouterr().err == ""


def timed(flush: Any, into: list[float]) -> Any:
    def flushed(trace: Any) -> None:
        start = time.perf_counter()
        flush(trace)
        into.append(time.perf_counter() - start)

    return flushed


def test_a_fault_in_telling_is_a_warning(collector: Collector) -> None:
    report = RunReport("out")
    with begin(NEEDED) as trace:
        trace.shard({"counts": {}})
        trace.shard({"counts": {}})
        trace.end(report)
    assert report.warnings == ["OpenTelemetry: shard: KeyError: 'seconds'; the run itself is not affected"]


def test_without_the_packages_there_is_one_warning_that_names_them(
    corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    report = embed(corpus, tmp_path / "out", model_dir)
    [warning] = report.warnings
    assert "pip install 'embed-corpus[otel]'" in warning
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke", "no installed package exports traces as 'smoke'"),
        ("OTEL_TRACES_EXPORTER", "jaeger", "OTEL_TRACES_EXPORTER: no installed package exports traces as 'jaeger'"),
    ],
)
def test_an_exporter_that_does_not_exist_is_a_warning(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)
    with begin(NEEDED) as trace:
        assert trace.trace_id == ""
    assert reason in capsys.readouterr().err  # no report took it


def test_what_is_exported_is_chosen_as_every_sdk_does() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    everything = {"traces": ["otlp"], "metrics": ["otlp"], "logs": ["otlp"]}
    assert wanted({}) == {}
    assert wanted(endpoint) == everything
    assert wanted({**endpoint, "OTEL_SDK_DISABLED": "true"}) == {}
    assert wanted({"OTEL_TRACES_EXPORTER": "otlp, console"}) == {"traces": ["otlp", "console"]}
    assert wanted({**endpoint, "OTEL_METRICS_EXPORTER": "none"}) == {"traces": ["otlp"], "logs": ["otlp"]}
    assert wanted({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://logs/v1/logs"}) == {"logs": ["otlp"]}


def test_the_console_exporter_leaves_stdout_to_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for signal in ("TRACES", "METRICS", "LOGS"):
        monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "console")
    with begin(NEEDED) as trace:
        trace.log("checked")
        trace.end(RunReport("out"))
    said = capsys.readouterr()
    assert "embed_corpus.run" in said.err
    assert said.out == ""


def modules_after(code: str, **environment: str) -> set[str]:
    """The modules of a process apart once it has run ``code``."""
    script = f"import sys\n{code}\nprint(*sys.modules, file=sys.stdout)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, check=True, capture_output=True, text=True, env={**clean, **environment},
    )  # fmt: skip
    return set(done.stdout.split())


def test_without_the_variables_nothing_of_it_is_imported(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    given = {"input": str(corpus), "output": str(tmp_path / "out"), "model": model_dir, "index": "none"}
    code = f"""
from pipeline.config import build_config
from pipeline.run import run
report = run(build_config(None, {given!r}), stand_in={STAND_IN!r})
assert report.shards_done == 3
"""
    assert not [name for name in modules_after(code) if name.split(".")[0] == "opentelemetry"]


def test_a_worker_imports_nothing_of_it_with_the_variables_either() -> None:
    modules = modules_after("import pipeline.worker", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318")
    assert "pipeline.worker" in modules
    assert not [name for name in modules if name.split(".")[0] == "opentelemetry"]
