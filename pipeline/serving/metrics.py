"""What a server did, as Prometheus reads it at ``/metrics``.

Labels are few and known beforehand: routes by their pattern, reasons and stages from a fixed list, API keys and
upstreams by the names in the configuration. No text, id, address or key is ever a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STAGES = ("queue", "tokenize", "compute", "search", "fallback")
OTHER = "other"  # a path that is not ours


class Metrics:
    """Counters of one server.

    Args:
        facts: of the server, for ``embed_corpus_info``.
        key_names: of the API keys.
        price_per_million_tokens: makes the cost of tokens; None leaves it out.
    """

    def __init__(
        self, facts: Mapping[str, str], key_names: tuple[str, ...], price_per_million_tokens: float | None
    ) -> None:
        self._registry = CollectorRegistry()
        self._price = price_per_million_tokens
        about: dict[str, Any] = {"registry": self._registry, "namespace": "embed_corpus"}
        self._requests = Counter("requests", "Requests answered", ("route", "status"), **about)
        timed = {"buckets": SECONDS, **about}
        self._seconds = Histogram("request_seconds", "From headers to answer", ("route",), **timed)
        stages = Histogram("stage_seconds", "Part of a request", ("stage",), **timed)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._rejected = Counter("rejected", "Requests without an answer of use, by reason", ("reason",), **about)
        self._texts = Counter("texts", "Texts embedded, by API key", ("key",), **about)
        self._tokens = Counter("tokens", "Tokens embedded, by API key", ("key",), **about)
        self._cost = Counter("cost", "Price of the tokens, by API key", ("key",), **about)
        self._fallbacks = Counter("fallback", "Attempts at another server", ("upstream", "outcome"), **about)
        for name in key_names:
            self._tokens.labels(name)
        Gauge("info", "This server; always 1", tuple(facts), **about).labels(**facts).set(1)

    def watch(self, read: Callable[[], Iterator[Metric]]) -> None:
        """Take live figures at each scrape."""
        self._registry.register(_Live(read))

    def answered(self, route: str, status: int, seconds: float, stages: Mapping[str, float]) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        for stage, value in stages.items():
            self._stages[stage].observe(value)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def embedded(self, key: str, num_texts: int, num_tokens: int) -> None:
        self._texts.labels(key).inc(num_texts)
        self._tokens.labels(key).inc(num_tokens)
        if self._price is not None:
            self._cost.labels(key).inc(num_tokens * self._price / 1e6)

    def fell_back(self, upstream: str, outcome: str) -> None:
        self._fallbacks.labels(upstream, outcome).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Live(Collector):
    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []  # nothing is read when it is registered

    def collect(self) -> Iterator[Metric]:
        return self._read()


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"embed_corpus_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"embed_corpus_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"embed_corpus_{name}", text, value=value)
