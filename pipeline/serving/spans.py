"""A request as OpenTelemetry sees it: one span, inside it a span for each stage, continued from the caller's.

    POST /search                  traceparent of the caller
    ├── queue · tokenize · compute
    ├── fallback                  another server embedded instead
    └── search

What is exported, and where to, is set by the standard ``OTEL_`` variables as for a run (see `pipeline.tracing`);
without them no module of OpenTelemetry is imported. Texts, vectors and keys are never exported. Nothing that goes wrong
here ends or holds up a request.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import one_line

if TYPE_CHECKING:
    from opentelemetry.trace import Span

FLUSH_S = 5.0
ORDER = ("tokenize", "queue", "compute", "fallback", "search")


class Spans:
    """No traces; and what an exporting one offers.

    Attributes:
        warning: why nothing is exported although it was asked for; empty otherwise.
    """

    warning = ""

    def begin(self, name: str, headers: Mapping[str, str]) -> Any:
        """The span of a request; None where nothing is exported.

        Args:
            name: method and route.
            headers: of the request; ``traceparent`` and ``tracestate`` are read.
        """
        return None

    def trace_id(self, span: Any) -> str | None:
        """32 hexadecimal digits."""
        return None

    def carrier(self, span: Any) -> dict[str, str]:
        """Headers that continue the trace in another server."""
        return {}

    def end(self, span: Any, stages: Mapping[str, float], **attributes: Any) -> None:
        """The answer was sent.

        Args:
            span: as ``begin`` gave it.
            stages: seconds by stage; they are laid end to end before now, in the order in which they happen.
            **attributes: None is left out; ``status`` from 500 on makes the span an error.
        """

    def close(self) -> None:
        """Deliver what is there; gives up after a few seconds."""


def begin_tracing(service_name: str, environ: Mapping[str, str] = os.environ) -> Spans:
    """What the environment asks for; where it cannot be had, one that does nothing and says why."""
    if not any(name.startswith("OTEL_") for name in environ):
        return Spans()
    from pipeline.tracing import wanted

    names = wanted(environ).get("traces", [])
    if not names:
        return Spans()
    try:
        return _Exported(service_name, names, environ)
    except ImportError as error:
        reason = f"{error.name or 'a package'} is not installed: pip install 'embed-corpus[otel]'"
    except Exception as error:  # whatever is wrong with the variables, serving is more important
        reason = one_line(error)
    spans = Spans()
    spans.warning = f"OpenTelemetry is asked for, but {reason}; nothing is exported"
    return spans


class _Exported(Spans):
    def __init__(self, service_name: str, names: list[str], environ: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from pipeline.tracing import _Complaints, exporter, resource_attributes

        facts = {**resource_attributes(None, environ), "service.name": service_name}
        resource = Resource.create(facts).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for name in names:
            self._provider.add_span_processor(BatchSpanProcessor(exporter("traces", name, environ)))
        self._tracer = self._provider.get_tracer("embed_corpus.serve")
        self._propagator = TraceContextTextMapPropagator()
        self._complaints = _Complaints()  # a collector that is away must not fill stderr
        # One clock for all spans: a step of the system's own must not make one end before it began.
        self._since_epoch_s = time.time() - time.perf_counter()

    def _ns(self, at: float) -> int:
        return round((self._since_epoch_s + at) * 1e9)

    def begin(self, name: str, headers: Mapping[str, str]) -> Any:
        from opentelemetry.trace import SpanKind

        with contextlib.suppress(Exception):
            context = self._propagator.extract(headers)
            now = self._ns(time.perf_counter())
            return self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=now)
        return None

    def trace_id(self, span: Span | None) -> str | None:
        from opentelemetry.trace import format_trace_id

        return None if span is None else format_trace_id(span.get_span_context().trace_id)

    def carrier(self, span: Span | None) -> dict[str, str]:
        from opentelemetry.trace import set_span_in_context

        headers: dict[str, str] = {}
        if span is not None:
            self._propagator.inject(headers, set_span_in_context(span))
        return headers

    def end(self, span: Span | None, stages: Mapping[str, float], **attributes: Any) -> None:
        if span is None:
            return
        with contextlib.suppress(Exception):
            self._end(span, stages, attributes)

    def _end(self, span: Span, stages: Mapping[str, float], attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        now = time.perf_counter()
        at, inside = now - sum(stages.values()), set_span_in_context(span)
        for stage in ORDER:
            if stage in stages:
                child = self._tracer.start_span(f"embed_corpus.{stage}", inside, start_time=self._ns(at))
                at += stages[stage]
                child.end(self._ns(at))
        span.set_attributes({f"embed_corpus.{name}": value for name, value in attributes.items() if value is not None})
        status = int(attributes.get("status") or 0)
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(now))

    def close(self) -> None:
        closer = threading.Thread(target=self._provider.shutdown, daemon=True)
        closer.start()
        closer.join(FLUSH_S)
        self._complaints.stop()
