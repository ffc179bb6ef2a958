"""A run as OpenTelemetry sees it: one trace, a span a shard with its stages inside, metrics, the run's lines as logs.

The coordinator alone exports; workers know nothing of it, their measured seconds come with the commit records. What is
exported is set by the variables that every OpenTelemetry SDK reads (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_TRACES_EXPORTER`` …), and a ``TRACEPARENT`` in the environment is continued. Without such a variable no module of
OpenTelemetry is imported. The SDK's global providers are left to the program that this one is part of.

Texts, ids and vectors are never exported. Nothing that goes wrong here ends or holds up a run: it is one warning.

    embed_corpus.run                     the whole run
    ├── embed_corpus.load                a worker loads and tunes its model
    ├── embed_corpus.shard               ends when its commit record has arrived
    │   ├── wait_for_input, pack, encode, wait_for_writer, other …    exclusive: end to end they are the shard
    │   └── read, tokenize, write, device …                           beside these, in other threads and processes
    └── embed_corpus.index
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipeline.config import RunConfig
from pipeline.errors import one_line
from pipeline.pool import Event
from pipeline.progress import Display, JsonDisplay, Show, describe, level_of
from pipeline.ranks import Rank
from pipeline.records import Shard
from pipeline.telemetry import RunReport

if TYPE_CHECKING:
    from opentelemetry.context import Context

SIGNALS = ("traces", "metrics", "logs")
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # as the exporters are registered
FLUSH_S = 5.0  # SIGTERM leaves 20 to 30 s in all
SHARD_SECONDS = [0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600]  # bounds of the histogram

POD = {
    "POD_NAME": "k8s.pod.name",
    "POD_UID": "k8s.pod.uid",
    "POD_NAMESPACE": "k8s.namespace.name",
    "NODE_NAME": "k8s.node.name",
    "JOB_NAME": "k8s.job.name",
    "JOB_COMPLETION_INDEX": "k8s.job.completion_index",
}
TASK = {
    "AIRFLOW_CTX_DAG_ID": "airflow.dag_id",
    "AIRFLOW_CTX_DAG_RUN_ID": "airflow.run_id",
    "AIRFLOW_CTX_TASK_ID": "airflow.task_id",
    "AIRFLOW_CTX_TRY_NUMBER": "airflow.try_number",
}


def begin(config: RunConfig, rank: Rank | None = None, environ: Mapping[str, str] = os.environ) -> Trace:
    """Start the trace of a run; use it as a context manager.

    Args:
        config: of the run.
        rank: which of several processes this is.
        environ: says whether and what to export, and who started the run. The SDK itself reads ``os.environ``.

    Returns:
        One that does nothing where nothing is to be exported, or where it cannot be: then it brings a warning.
    """
    exporters = wanted(environ)
    if not exporters:
        return Trace(rank)
    try:
        return _Exported(config, rank, environ, exporters)
    except ImportError as error:
        reason = f"{error.name or 'a package'} is not installed: pip install 'embed-corpus[otel]'"
    except Exception as error:  # whatever is wrong with the variables, the run is more important
        reason = one_line(error)
    return Trace(rank, [f"OpenTelemetry is asked for, but {reason}; nothing is exported"])


def wanted(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of the exporters of each signal that has one.

    A signal has one when it is named (``OTEL_METRICS_EXPORTER`` …) or has an OTLP endpoint, of its own or for all.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    chosen = {}
    for signal in SIGNALS:
        name = signal.upper()
        endpoint = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
        names = environ.get(f"OTEL_{name}_EXPORTER", "").strip() or ("otlp" if endpoint else "")
        chosen[signal] = [each for each in map(str.strip, names.split(",")) if each not in ("", "none")]
    return {signal: names for signal, names in chosen.items() if names}


class Trace:
    """A run that is not traced; and what one that is offers.

    Attributes:
        trace_id: 32 hexadecimal digits; empty without a trace.
    """

    trace_id = ""

    def __init__(self, rank: Rank | None = None, warnings: Sequence[str] = ()) -> None:
        self._rank, self._warnings = rank, list(warnings)
        self._shown: Display | None = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.abandon(error)
        for warning in self._warnings:  # no report has taken them
            if isinstance(self._shown, JsonDisplay):
                self._shown.line(warning, "warning")
            else:
                print(f"warning: {warning}", file=sys.stderr)
        self._warnings = []

    def display(self, display: Display) -> Display:
        """One to use in place of ``display``: what it shows is traced. JSON lines get the rank and the trace id."""
        self._shown = display
        if isinstance(display, JsonDisplay):
            rank = None if self._rank is None else self._rank.number
            display.about(rank=rank, trace_id=self.trace_id or None)
        return display

    def event(self, event: Event) -> None:
        """What happened to a shard or worker. A trace's own ``display`` calls it: then call neither this, nor
        ``shard``, nor ``failure`` for the same thing.
        """

    def log(self, text: str, level: str = "info", **attributes: Any) -> None:
        """A line of the run."""

    def shard(self, record: dict[str, Any]) -> None:
        """A finished shard, when its commit record has arrived; one made of parts once, not each part."""

    def index(self, document: dict[str, Any], start: float, end: float) -> None:
        """The index.

        Args:
            document: the content of index.json.
            start, end: of its building, in seconds of ``time.perf_counter``.
        """

    def failure(self, shard: str, kind: str, reason: str) -> None:
        """A shard that was not finished, or the index; as in ``RunReport.failed``."""

    def retry(self, unit: str, reason: str) -> None:
        """A worker was lost and its work is given out again."""

    def end(self, report: RunReport) -> None:
        """The run is over, well or with failures. The report gets the warnings, and what of it was not told is told."""
        report.warnings += self._warnings
        self._warnings = []

    def abandon(self, error: BaseException | None) -> None:
        """The run is over without a report; does nothing after ``end``."""


Telling = TypeVar("Telling", bound=Callable[..., None])


def harmless(tell: Telling) -> Telling:
    """Telling of a run must never end it: what goes wrong is a warning, once."""

    @functools.wraps(tell)
    def guarded(self: _Exported, *args: Any, **kwargs: Any) -> None:
        try:
            tell(self, *args, **kwargs)
        except Exception as error:
            self.warn(f"{tell.__name__}: {type(error).__name__}: {one_line(error)}")

    return cast(Telling, guarded)


class _Exported(Trace):
    """One that is exported.

    Args:
        config, rank, environ: as for ``begin``.
        exporters: as ``wanted`` found them.

    Raises:
        ImportError: a package is missing.
        ValueError: there is no such exporter.
    """

    def __init__(
        self, config: RunConfig, rank: Rank | None, environ: Mapping[str, str], exporters: Mapping[str, list[str]]
    ) -> None:
        super().__init__(rank)
        self._price_per_hour, self._cost = config.price_per_hour or 0.0, 0.0
        self._failed: set[tuple[str, str]] = set()
        self._ended = False
        # One clock for everything: a step of the system's own must not make a span end before it began.
        self._since_epoch_s = time.time() - time.perf_counter()
        self._began = time.perf_counter()
        self._shutdowns: list[Callable[[], Any]] = []
        self._metrics: dict[str, Any] = {}
        self._logger: Any = None
        self._complaints = _Complaints()
        try:
            self._set_up(exporters, rank, environ)
            self._start(config, rank, environ)
        except BaseException:
            self._complaints.stop()
            raise
        self._priced_from = time.perf_counter()  # as the report, which knows nothing of the time that all this took

    def _set_up(self, exporters: Mapping[str, list[str]], rank: Rank | None, environ: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        made = {signal: [exporter(signal, name, environ) for name in names] for signal, names in exporters.items()}
        # What the variables say of the resource wins over what is found out here.
        resource = Resource.create(resource_attributes(rank, environ)).merge(OTELResourceDetector().detect())
        # Nothing is left for the interpreter's exit, where it could hang: ``_flush`` is bounded.
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        for each in made.get("traces", ()):
            tracers.add_span_processor(BatchSpanProcessor(each))
        self._shutdowns.append(tracers.shutdown)
        self._tracer = tracers.get_tracer("embed_corpus")
        if "metrics" in made:
            self._metrics = self._instruments(made["metrics"], resource)
        if "logs" in made:
            self._logger = self._log_emitter(made["logs"], resource)

    def _start(self, config: RunConfig, rank: Rank | None, environ: Mapping[str, str]) -> None:
        from opentelemetry.trace import format_trace_id
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: environ.get(name.upper(), "").strip() for name in ("traceparent", "tracestate")}
        self._root = self._span(
            "embed_corpus.run",
            TraceContextTextMapPropagator().extract({name: value for name, value in carrier.items() if value}),
            self._began,
            model=config.model,
            output=config.output,
            devices=config.devices,
            rank=None if rank is None else rank.number,
            world_size=None if rank is None else rank.of,
        )
        self._context = self._inside(self._root)
        self.trace_id = format_trace_id(self._root.get_span_context().trace_id)

    def _instruments(self, exporters: Sequence[Any], resource: Any) -> dict[str, Any]:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers = [PeriodicExportingMetricReader(each) for each in exporters]
        meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        self._shutdowns.append(meters.shutdown)
        meter = meters.get_meter("embed_corpus")
        counters = {
            "tokens": ("{token}", "Tokens computed"),
            "texts": ("{text}", "Different texts embedded"),
            "rows": ("{row}", "Input rows read"),
            "truncated": ("{text}", "Texts cut at the length limit"),
            "quarantined": ("{row}", "Rows that got no vector"),
            "retries": ("{unit}", "Units of work given out again after their worker was lost"),
            "cost": ("1", "Cost so far, in the currency of the price per hour"),
            "shards": ("{shard}", "Shards that ended, by outcome"),
        }
        made: dict[str, Any] = {
            name: meter.create_counter(f"embed_corpus.{name}", unit, description)
            for name, (unit, description) in counters.items()
        }
        made["idle"] = meter.create_gauge("embed_corpus.device.idle", "1", "Share of the last shard's time")
        made["seconds"] = meter.create_histogram(
            "embed_corpus.shard.duration",
            "s",
            "Time of the device's thread a shard",
            explicit_bucket_boundaries_advisory=SHARD_SECONDS,
        )
        return made

    def _log_emitter(self, exporters: Sequence[Any], resource: Any) -> Any:
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        for each in exporters:
            loggers.add_log_record_processor(BatchLogRecordProcessor(each))
        self._shutdowns.append(loggers.shutdown)
        return loggers.get_logger("embed_corpus")

    def display(self, display: Display) -> Display:
        return _Told(super().display(display), self)

    def warn(self, reason: str) -> None:
        """Note what went wrong here; the first is enough."""
        if not self._warnings:
            self._warnings.append(f"OpenTelemetry: {reason}; the run itself is not affected")

    @harmless
    def event(self, event: Event) -> None:
        name = "" if event.shard is None else event.shard.unit
        if event.kind == "lost":
            self.retry(name, event.reason)
        elif event.kind in ("bad", "gave up", "bug"):
            assert event.shard is not None
            self.failure(event.shard.path, event.kind, event.reason)
        elif said := describe(event):
            self.log(said, level_of(event), **{"shard.key": name or None})
        if event.kind == "ready" and event.values is not None:
            self._loaded(event.values)
        if event.kind == "done" and event.values is not None:
            self.shard(event.values)

    @harmless
    def log(self, text: str, level: str = "info", **attributes: Any) -> None:
        if self._logger is None:
            return
        from opentelemetry._logs import SeverityNumber

        numbers = {"info": SeverityNumber.INFO, "warning": SeverityNumber.WARN, "error": SeverityNumber.ERROR}
        now = self._ns(time.perf_counter())
        self._logger.emit(
            timestamp=now,
            observed_timestamp=now,
            context=self._context,
            severity_number=numbers[level],
            severity_text=numbers[level].name,
            body=text,
            attributes=named(attributes),
        )

    @harmless
    def shard(self, record: dict[str, Any]) -> None:
        counts, seconds, busy = record["counts"], dict(record["seconds"]), record["busy_seconds"]
        wall_s, end = seconds.pop("wall"), time.perf_counter()
        start, quarantined = end - wall_s, sum(counts["quarantined"].values())
        span = self._span(
            "embed_corpus.shard",
            self._context,
            start,
            **{"shard.key": record["shard"]["key"], "shard.parts": record.get("parts")},
            **{f"busy_seconds.{stage}": value for stage, value in busy.items()},
            rows=counts["rows"],
            vectors=counts["rows_out"],
            texts=counts["texts"],
            tokens=counts["tokens"],
            truncated=counts["truncated_texts"],
            quarantined=quarantined,
            device=record.get("device"),
            device_idle=record["device_idle"],
            tokens_per_s=record["tokens_per_s"],
            cost=record.get("cost"),
            host=record.get("host"),
        )
        within, at = self._inside(span), start
        for stage, value in seconds.items():
            self._stage(within, stage, at, value, value, exclusive=True)
            at += value
        for stage, value in busy.items():
            # Several processes, or work done ahead while another shard was on the device, can be longer than the shard.
            length = min(value, wall_s)
            self._stage(within, stage, end - length if stage == "write" else start, length, value, exclusive=False)
        span.end(self._ns(end))
        self._count("tokens", counts["tokens"])
        self._count("texts", counts["texts"])
        self._count("rows", counts["rows"])
        self._count("truncated", counts["truncated_texts"])
        for reason, count in counts["quarantined"].items():
            self._count("quarantined", count, reason=reason)
        self._count("shards", 1, outcome="done")
        self._count_cost((end - self._priced_from) / 3600 * self._price_per_hour)
        if self._metrics:
            self._metrics["idle"].set(record["device_idle"], named({"device": record.get("device")}))
            self._metrics["seconds"].record(wall_s)

    @harmless
    def index(self, document: dict[str, Any], start: float, end: float) -> None:
        span = self._span(
            "embed_corpus.index",
            self._context,
            start,
            **{
                "index.factory": document.get("factory"),
                "index.vectors": document.get("ntotal"),
                "index.recall_at_10": (document.get("recall_at_10") or {}).get("value"),
                "index.reused": document.get("reused"),
            },
        )
        span.end(self._ns(end))

    @harmless
    def failure(self, shard: str, kind: str, reason: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._failed.add((shard, kind))
        self.log(reason, "error", **{"shard.path": shard, "failure": kind})
        of_shard = shard != "index"
        now = time.perf_counter()
        name = "embed_corpus.shard" if of_shard else "embed_corpus.index"
        span = self._span(name, self._context, now, **{"shard.path": shard if of_shard else None, "failure": kind})
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, reason))
        span.end(self._ns(now))
        if of_shard:
            self._count("shards", 1, outcome=kind)

    @harmless
    def retry(self, unit: str, reason: str) -> None:
        self.log(reason, "warning", **{"shard.key": unit or None})
        about = named({"shard.key": unit or None, "reason": reason})
        self._root.add_event("embed_corpus.retry", about, self._ns(time.perf_counter()))
        self._count("retries", 1)

    def end(self, report: RunReport) -> None:
        if not self._ended:
            self._ended = True
            self._tell_report(report)
            self._flush()
        super().end(report)

    @harmless
    def _tell_report(self, report: RunReport) -> None:
        from opentelemetry.trace import Status, StatusCode

        for failure in report.failed:
            if (failure.shard, failure.kind) not in self._failed:
                self.failure(failure.shard, failure.kind, failure.reason)
        self._count_cost(report.cost or 0.0)
        counts = report.counts
        facts = {
            "rows": counts.rows,
            "vectors": counts.rows_out,
            "texts": counts.texts,
            "tokens": counts.tokens,
            "truncated": counts.truncated_texts,
            "quarantined": sum(counts.quarantined.values()),
            "device": report.device,
            "attention": report.attention or None,
            "dtype": report.dtype or None,
            "shards.done": report.shards_done,
            "shards.skipped": report.shards_skipped,
            "shards.failed": report.shards_failed,
            "retries": report.retries,
            "tokens_per_s": report.tokens_per_s,
            "cost": report.cost,
            "verdict": report.verdict or None,
            "stopped": report.stopped or None,
            "exit_code": report.exit_code,
        }
        self._root.set_attributes(named(facts))
        if report.failed or report.exit_code:
            reason = report.failed[0].reason if report.failed else report.stopped
            self._root.set_status(Status(StatusCode.ERROR, reason or f"exit code {report.exit_code}"))
        self.log(report.sentence())
        self._root.end(self._ns(time.perf_counter()))

    def abandon(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._tell_error(error)
            self._flush()

    @harmless
    def _tell_error(self, error: BaseException | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        now = time.perf_counter()
        self._count_cost((now - self._priced_from) / 3600 * self._price_per_hour)
        if error is not None:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
            self.log(reason, "error")
            self._root.set_attribute("error.type", type(error).__name__)
            self._root.set_status(Status(StatusCode.ERROR, reason))
        self._root.end(self._ns(now))

    def _flush(self) -> None:
        """Deliver what is there; gives up after ``FLUSH_S``, whatever the exporters are doing."""
        closer = threading.Thread(target=self._close, name="telemetry", daemon=True)
        closer.start()
        closer.join(FLUSH_S)
        if closer.is_alive():
            self.warn(f"not everything was delivered within {FLUSH_S:g} s{self._complaints.cause()}")
        elif self._complaints.lost:
            self.warn(f"not everything was delivered{self._complaints.cause()}")

    def _close(self) -> None:
        threads = [threading.Thread(target=self._quietly, args=(each,), daemon=True) for each in self._shutdowns]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._complaints.stop()

    @harmless
    def _quietly(self, shutdown: Callable[[], Any]) -> None:
        shutdown()

    def _ns(self, at: float) -> int:
        """Nanoseconds since the epoch of a moment in seconds of ``time.perf_counter``."""
        return round((self._since_epoch_s + at) * 1e9)

    def _span(self, name: str, context: Context, start: float, **attributes: Any) -> Any:
        return self._tracer.start_span(name, context, attributes=named(attributes), start_time=self._ns(start))

    def _inside(self, span: Any) -> Context:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span)

    def _stage(
        self, context: Context, name: str, start: float, length_s: float, seconds: float, *, exclusive: bool
    ) -> None:
        if seconds:
            attributes = {"stage.seconds": seconds, "stage.exclusive": exclusive}
            self._span(name, context, start, **attributes).end(self._ns(start + length_s))

    def _loaded(self, ready: dict[str, Any]) -> None:
        end = time.perf_counter()
        took_s = ready["load_s"] + ready.get("tune_s", 0.0)
        attributes = {name: ready.get(name) for name in ("device", "dtype", "attention", "load_s", "tune_s")}
        self._span("embed_corpus.load", self._context, end - took_s, **attributes).end(self._ns(end))

    def _count(self, name: str, amount: float, **attributes: Any) -> None:
        if self._metrics and amount:
            self._metrics[name].add(amount, named(attributes))

    def _count_cost(self, so_far: float) -> None:
        """The counter goes up to what the run has cost; a shard that was put together adds nothing of its parts'."""
        self._count("cost", max(0.0, so_far - self._cost))
        self._cost = max(self._cost, so_far)


class _Told:
    """A display whose lines and events a trace hears of, too."""

    def __init__(self, display: Display, trace: Trace) -> None:
        self._display, self._trace = display, trace

    def line(self, text: str) -> None:
        self._display.line(text)
        self._trace.log(text)

    @contextlib.contextmanager
    def embedding(self, shards: Sequence[Shard]) -> Iterator[Show]:
        rows = sum(shard.num_rows or 0 for shard in shards)
        self._trace.log(f"{len(shards)} shards, {rows:,} rows to embed")
        with self._display.embedding(shards) as show:

            def told(event: Event) -> None:
                show(event)
                self._trace.event(event)

            yield told


class _Complaints(logging.Handler):
    """What the SDK logs about its exporters, kept from stderr: a collector that is away must not fill it.

    Attributes:
        lost: whether something was dropped; a failed attempt that is repeated with success is none.
    """

    _logger = logging.getLogger("opentelemetry")
    _mine = threading.Lock()
    _open = 0  # one that was given up may still be at it when the next run of this process begins
    _propagated = True

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lost, self._last, self._why = False, "", ""
        kind = type(self)
        with kind._mine:
            if not kind._open:
                kind._propagated, self._logger.propagate = self._logger.propagate, False
            kind._open += 1
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if "rror" in text or "reason" in text:
            self._why = text  # the last attempt's own words; what follows says only that there is no further one
        self._last = text
        self.lost |= record.levelno >= logging.ERROR or "ropping" in text

    def cause(self) -> str:
        text = self._why or self._last
        return f" ({text})" if text else ""

    def stop(self) -> None:
        kind = type(self)
        self._logger.removeHandler(self)
        with kind._mine:
            kind._open -= 1
            if not kind._open:
                self._logger.propagate = kind._propagated


def exporter(signal: str, name: str, environ: Mapping[str, str]) -> Any:
    """An exporter, by the name it is registered under; it reads its settings from the environment.

    Raises:
        ImportError: its package is missing.
        ValueError: no installed package has one of that name.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    if name == "otlp":
        own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        protocol = own or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
        variable, name = "OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOLS.get(protocol, protocol)
    registered = importlib.metadata.entry_points(group=f"opentelemetry_{signal}_exporter", name=name)
    if not registered:
        if name == PROTOCOLS["http/protobuf"]:
            raise ModuleNotFoundError(name="opentelemetry-exporter-otlp-proto-http")
        raise ValueError(f"{variable}: no installed package exports {signal} as '{name}'")
    make = next(iter(registered)).load()
    return make(out=sys.stderr) if name == "console" else make()  # stdout is for results


def resource_attributes(rank: Rank | None, environ: Mapping[str, str]) -> dict[str, str | int]:
    """Who exports: this process, its rank, and the pod or task it was started as."""
    # Names as general as these mean a pod only in one.
    known = {**(POD if "KUBERNETES_SERVICE_HOST" in environ else {}), **TASK}
    return {
        "service.name": "embed-corpus",
        "service.instance.id": str(uuid.uuid4()),  # the counters of two ranks are not one
        "host.name": socket.gethostname(),
        **({} if rank is None else {"embed_corpus.rank": rank.number, "embed_corpus.world_size": rank.of}),
        **{name: environ[variable] for variable, name in known.items() if environ.get(variable)},
    }


def named(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes under our name; what is not known is left out."""
    return {f"embed_corpus.{name}": value for name, value in facts.items() if value is not None}
