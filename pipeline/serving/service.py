"""What the routes share: the engine, the search process, the fallback, and how a request's texts become vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from pipeline.config import nearest
from pipeline.serving import errors
from pipeline.serving.access_log import AccessLog
from pipeline.serving.exchange import Exchange, Problem, invalid
from pipeline.serving.fallback import Fallback, NoFallback
from pipeline.serving.keys import EVERYBODY, Keys
from pipeline.serving.metrics import Metrics, counter, gauge, gauges
from pipeline.serving.search_client import SearchClient
from pipeline.serving.settings import ServeSettings
from pipeline.serving.spans import Spans

if TYPE_CHECKING:
    from pipeline.serving.engine import Engine

Vectors = NDArray[np.float32]


class Service:
    """One server's parts, put together; made by `server.serve`, and by tests.

    Args:
        engine: started.
        settings: see there.
        search: started; None where only a model is served.
        log: for requests and events.
        spans: see `spans.begin_tracing`.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServeSettings,
        *,
        search: SearchClient | None = None,
        log: AccessLog | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.engine, self.settings, self.search = engine, settings, search
        self.log = log or AccessLog(requests=settings.access_log)
        self.spans = spans or Spans()
        self.keys = Keys(settings.api_keys)
        info = engine.info
        facts = {"service_name": settings.service_name, "model": info.model, "version": info.version}
        facts |= {"fingerprint": info.fingerprint, "device": info.device, "lane": info.lane}
        names = self.keys.names or (EVERYBODY,)
        self.metrics = Metrics(facts, names, settings.price_per_million_tokens)
        self.metrics.watch(self._figures)
        self.fallback: Fallback | None = None
        if settings.fallbacks:
            self.fallback = Fallback(
                settings, normalize=info.normalize, say=self.log.event, count=self.metrics.fell_back
            )

    async def start(self) -> None:
        """Begin to write the log, and to compare the upstreams' vectors with ours."""
        self.log.start()
        if self.fallback is not None:
            await self.fallback.start(self._own)

    async def stop(self) -> None:
        """End all that was started here, the engine and the search process too."""
        if self.fallback is not None:
            await self.fallback.close()
        if self.search is not None:
            await self.search.close()
        await self.engine.close()
        await asyncio.to_thread(self.spans.close)
        await self.log.stop()

    async def _own(self, texts: Sequence[str]) -> Vectors:
        deadline = asyncio.get_running_loop().time() + 60
        return (await self.engine.embed(texts, lane="bulk", deadline=deadline)).vectors

    # -- for the routes ----------------------------------------------------------------------------------------------

    def prompt(self, name: str | None) -> str:
        """The text of a prompt; ``document`` and ``query`` are those of this output, no name means no prompt."""
        info = self.engine.info
        known = {**info.prompts, "document": info.document_prompt, "query": info.query_prompt}
        if name is None:
            return ""
        if name not in known:
            raise invalid(f"prompt_name: this model has no prompt '{name[:80]}'; {nearest(name, list(known))}")
        return known[name]

    def check_batch(self, what: str, num: int) -> None:
        """Neither none nor more than one request may bring."""
        if not num:
            raise Problem(400, "Empty", f"`{what}` cannot be empty", "invalid")
        if num > (limit := self.settings.max_client_batch_size):
            message = f"batch size {num} > maximum allowed batch size {limit}"
            raise Problem(413, "Validation", message, "batch_size")

    async def embed(self, exchange: Exchange, texts: Sequence[str], *, prompt: str, truncate: bool | None) -> Vectors:
        """(n, dim) float32 vectors of n texts, from here, or from another server that computes the same.

        Args:
            exchange: learns what it took and who did it.
            texts: checked by ``check_batch``.
            prompt: put before each text.
            truncate: cut what is too long; None takes the server's default.

        Raises:
            ServingError: see `serving.errors`.
        """
        truncate = self.settings.auto_truncate if truncate is None else truncate
        deadline, falls_back = exchange.deadline, self.fallback is not None and not exchange.is_fallback
        loop = asyncio.get_running_loop()
        began = loop.time()
        if falls_back:
            after_ms = self.settings.fallback_after_ms
            deadline = began + (after_ms / 1000 if after_ms else (exchange.deadline - began) / 2)
        try:
            embedded = await self.engine.embed(
                texts,
                prompt=prompt,
                truncate=truncate,
                lane="query" if len(texts) == 1 else "bulk",
                deadline=min(deadline, exchange.deadline),
            )
        except (errors.Overloaded, errors.DeadlineExceeded, errors.EngineDown):
            if not falls_back:
                raise
            vectors = await self._from_another(exchange, [prompt + text for text in texts], truncate)
            if vectors is None:
                raise
            return vectors
        exchange.stages.update(embedded.seconds)
        exchange.num_texts, exchange.num_tokens = len(texts), int(embedded.num_tokens.sum())
        exchange.lane, exchange.answered_by = embedded.lane, self.settings.service_name
        exchange.in_ring = embedded.in_ring
        return embedded.vectors

    async def _from_another(self, exchange: Exchange, texts: list[str], truncate: bool) -> Vectors | None:
        assert self.fallback is not None
        began = time.perf_counter()
        headers = {"x-request-id": exchange.id, **self.spans.carrier(exchange.span)}
        try:
            answer = await self.fallback.embed(texts, truncate=truncate, deadline=exchange.deadline, headers=headers)
        except NoFallback as error:
            self.log.event("no_fallback", "warning", request_id=exchange.id, reason=str(error))
            return None
        finally:
            exchange.stages["fallback"] = time.perf_counter() - began
        exchange.num_texts, exchange.num_tokens = len(texts), answer.num_tokens
        exchange.answered_by = answer.upstream
        return answer.vectors

    def check_shape(self, normalize: bool | None, dimensions: int | None) -> None:
        """Whether vectors can be had so; asked before they are computed."""
        info = self.engine.info
        if normalize is False and info.normalize:
            raise invalid("normalize: the vectors of this output are normalised; leave it out or ask for true")
        if dimensions is not None and not 1 <= dimensions <= info.dim:
            raise invalid(f"dimensions: found {dimensions}, expected 1 to {info.dim}")

    def shaped(self, vectors: Vectors, normalize: bool | None, dimensions: int | None) -> Vectors:
        """Vectors as a request wants them.

        Args:
            vectors: (n, dim) float32, as the batch run stores them.
            normalize: None leaves them as they are.
            dimensions: keeps the first ones, renormalised where the vectors were normalised.
        """
        info = self.engine.info
        cut = dimensions is not None and dimensions < info.dim
        if cut:
            vectors = vectors[:, :dimensions]
        if (normalize and not info.normalize) or (cut and info.normalize):
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
        return np.ascontiguousarray(vectors, dtype=np.float32)

    # -- what is told of it ------------------------------------------------------------------------------------------

    def _figures(self) -> Iterator[Metric]:
        stats = self.engine.stats
        yield gauge("queue_tokens", "Tokens that wait", stats.queue_tokens)
        yield gauge("queue_requests", "Requests that wait", stats.queue_requests)
        yield gauge("batches_in_flight", "Batches that are computed now", stats.in_flight)
        yield gauge("batch_fill", "Share of the token budget that batches use, a running mean", stats.batch_fill)
        yield gauge("tokens_per_second", "While batches are computed, a running mean", stats.tokens_per_s)
        yield counter("batches", "Batches computed", stats.batches)
        yield counter("encoder_restarts", "Times that a process that computes was replaced", stats.restarts)
        yield gauge("up", "Whether texts can be embedded", float(self.engine.is_up))
        if self.search is not None:
            index = self.search.index
            yield gauge("index_vectors", "Vectors that are searched", index["ntotal"] if index else 0)
            yield counter("search_restarts", "Times that the search process was replaced", self.search.restarts)
            if self.settings.enable_gpu_ipc:
                yield counter("search_by_ipc", "Searches with vectors that stayed on the device", self.search.by_ring)
                yield counter("search_ipc_gone", "Searches that had to send theirs after all", self.search.ring_gone)
        if self.fallback is not None:
            admitted = {member.name: float(member.admitted) for member in self.fallback.members}
            yield gauges("fallback_admitted", "Whether its vectors are ours", "upstream", admitted)

    def about(self) -> dict[str, Any]:
        """What ``/info`` says, in TEI's names where TEI has one."""
        info, settings = self.engine.info, self.settings
        return {
            "model_id": info.model,
            "model_sha": None,
            "model_dtype": info.dtype,
            "model_type": {"embedding": {"pooling": info.pooling}},
            "max_concurrent_requests": settings.max_concurrent_requests,
            "max_input_length": info.max_length,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_batch_requests": settings.max_batch_size,
            "max_client_batch_size": settings.max_client_batch_size,
            "auto_truncate": settings.auto_truncate,
            "tokenization_workers": 1,
            "version": info.version,
            "sha": None,
            "docker_label": None,
            "service_name": settings.service_name,
            "dimensions": info.dim,
            "normalize": info.normalize,
            "prompts": info.prompts,
            "document_prompt": info.document_prompt,
            "query_prompt": info.query_prompt,
            "fingerprint": info.fingerprint,
            "device": info.device,
            "lane": info.lane,
            "parity": info.parity,
            "attention": info.attention,
            "index": None if self.search is None else self.search.index or {"trouble": self.search.trouble},
            "fallbacks": {} if self.fallback is None else self.fallback.states(),
        }
