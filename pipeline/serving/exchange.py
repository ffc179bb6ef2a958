"""One request from its headers to its log line: who asks, until when, what it took, who answered.

`Endpoint` is what all routes have in common: it lets in, reads the body within its limit, gives the handler the checked
request, turns every failure into the status and the shape of error that the route's clients expect, and drops the work
of a client that hung up. Handlers know nothing of HTTP but what they answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pipeline.serving import errors
from pipeline.serving.fallback import HOP_HEADER, NoFallback
from pipeline.serving.search_client import NotSearchable, SearchDown

if TYPE_CHECKING:
    from pipeline.serving.device_ring import InRing
    from pipeline.serving.service import Service

TIMEOUT_HEADER = "x-request-timeout-ms"
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
JSON = "application/json"
LONGEST_TIMEOUT_MS = 60_000.0  # that a client may ask for, unless the default is longer
HUNG_UP = 499  # in logs and metrics only: there is nobody to answer

Body = TypeVar("Body", bound=BaseModel)
Errors = list[tuple[str, str]]


class Problem(Exception):
    """A request that is not answered as it was meant to be.

    Args:
        status: HTTP's.
        kind: TEI's name of the kind of error.
        message: one line, for the client.
        reason: a label of metrics and logs.
        headers: beside the usual ones.
    """

    def __init__(
        self, status: int, kind: str, message: str, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.reason = status, kind, message, reason
        self.headers = dict(headers or {})


def invalid(message: str) -> Problem:
    """What was sent is not what the route takes."""
    return Problem(422, "Validation", message, "invalid")


STATUS: dict[type[errors.ServingError], tuple[int, str]] = {
    errors.Overloaded: (429, "Overloaded"),
    errors.DeadlineExceeded: (504, "Timeout"),
    errors.TooLong: (413, "Validation"),
    errors.NotEmbeddable: (422, "Tokenizer"),
    errors.EngineDown: (503, "Unhealthy"),
    errors.Cancelled: (HUNG_UP, "Cancelled"),
    SearchDown: (503, "Unhealthy"),
    NotSearchable: (422, "Validation"),
    NoFallback: (503, "Unhealthy"),
}


def problem_of(error: errors.ServingError) -> Problem:
    status, kind = STATUS.get(type(error), (424, "Backend"))
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))  # whole seconds is all HTTP has
    return Problem(status, kind, str(error), error.reason, headers)


@dataclass(slots=True)
class Exchange:
    """A request that is being answered.

    Attributes:
        id: the client's ``X-Request-Id``, or a new one.
        headers: of the request, names in small letters.
        began: ``time.perf_counter``.
        deadline: on the loop's clock.
        key: name of the API key.
        stages: seconds by stage.
        num_texts, num_tokens: embedded for it.
        lane, answered_by: who embedded.
        span: see `spans`.
        in_ring: where the vectors that were embedded for it are on the device, too.
        warnings: told in headers.
    """

    id: str
    headers: dict[str, str]
    began: float
    deadline: float = 0.0
    key: str | None = None
    stages: dict[str, float] = field(default_factory=dict)
    num_texts: int = 0
    num_tokens: int = 0
    lane: str | None = None
    answered_by: str | None = None
    span: Any = None
    in_ring: InRing | None = None

    @property
    def is_fallback(self) -> bool:
        """Whether another server sent this in its own place; it is not sent on."""
        return HOP_HEADER in self.headers

    def timing(self) -> dict[str, str]:
        """TEI's headers, whole milliseconds; and the finer ``server-timing``, which browsers show."""
        total = time.perf_counter() - self.began
        names = {"tokenize": "x-tokenization-time", "queue": "x-queue-time", "compute": "x-inference-time"}
        headers = {name: str(int(1000 * self.stages[stage])) for stage, name in names.items() if stage in self.stages}
        parts = [f"{stage};dur={1000 * value:.2f}" for stage, value in (*self.stages.items(), ("total", total))]
        headers |= {"x-total-time": str(int(1000 * total)), "server-timing": ", ".join(parts)}
        headers |= {"x-compute-time": headers["x-total-time"], "x-compute-tokens": str(self.num_tokens)}
        if self.answered_by:
            headers["x-answered-by"] = self.answered_by
        return headers


class ErrorShape(Protocol):
    """How a family of routes says what went wrong."""

    def __call__(self, problem: Problem) -> dict[str, Any]: ...


def tei_error(problem: Problem) -> dict[str, Any]:
    return {"error": problem.message, "error_type": problem.kind}


class Endpoint(Generic[Body]):
    """A route as ASGI.

    Args:
        service: what it asks.
        route: its path, a label of metrics.
        handler: (exchange, body) -> response; raises `Problem` or a `ServingError`.
        body: what is read from the request; None for a route without a body.
        shape: of its errors.
        statuses: of its errors, where its clients expect another one.
        open_to_all: needs no API key.
    """

    def __init__(
        self,
        service: Service,
        route: str,
        handler: Callable[[Exchange, Any], Awaitable[Response]],
        body: type[Body] | None = None,
        *,
        shape: ErrorShape = tei_error,
        statuses: Mapping[int, int] = MappingProxyType({}),
        open_to_all: bool = False,
    ) -> None:
        self._service, self.route, self._handler, self._body = service, route, handler, body
        self._shape, self._statuses, self._open = shape, statuses, open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        exchange = Exchange(request_id, headers, time.perf_counter())
        exchange.span = self._service.spans.begin(f"{scope['method']} {self.route}", headers)
        reason: str | None = None
        try:
            response = await self._answer(exchange, receive)
        except Problem as problem:
            reason, response = problem.reason, self._failure(exchange, problem)
        except errors.ServingError as error:
            reason, response = error.reason, self._failure(exchange, problem_of(error))
        except _HungUp:
            reason, response = "cancelled", Response(status_code=HUNG_UP)
        except asyncio.CancelledError:
            self._told(exchange, 503, "cancelled")
            raise
        except Exception as error:
            # Our bug. The traceback holds code, not values, so no text gets into the log.
            trace = "".join(traceback.format_tb(error.__traceback__))
            self._service.log.event("bug", "error", request_id=exchange.id, error=type(error).__name__, trace=trace)
            ours = Problem(500, "Backend", "an error of this server; its log has the trace", "bug")
            reason, response = ours.reason, self._failure(exchange, ours)
        response.headers["x-request-id"] = exchange.id
        try:
            if response.status_code != HUNG_UP:
                await response(scope, receive, send)
        finally:
            self._told(exchange, response.status_code, reason)

    async def _answer(self, exchange: Exchange, receive: Receive) -> Response:
        service = self._service
        exchange.deadline = self._deadline(exchange)
        exchange.key = service.keys.name_of(exchange.headers.get("authorization", ""))
        if exchange.key is None and not self._open:
            headers = {"www-authenticate": "Bearer", "connection": "close"}
            raise Problem(401, "Unauthorized", "no valid API key; send 'Authorization: Bearer KEY'", "key", headers)
        if self._body is None:
            return await self._handler(exchange, None)
        body = self._parsed(await self._read(exchange, receive))
        return await _unless_hung_up(self._handler(exchange, body), receive)

    def _deadline(self, exchange: Exchange) -> float:
        settings = self._service.settings
        timeout_ms = settings.request_timeout_ms
        if given := exchange.headers.get(TIMEOUT_HEADER):
            try:
                asked = float(given)
            except ValueError:
                asked = -1.0
            if not 0 < asked < float("inf"):
                raise invalid(f"{TIMEOUT_HEADER}: found '{given[:20]}', expected milliseconds above 0")
            timeout_ms = min(asked, max(timeout_ms, LONGEST_TIMEOUT_MS))
        return asyncio.get_running_loop().time() + timeout_ms / 1000

    async def _read(self, exchange: Exchange, receive: Receive) -> bytes:
        kind = exchange.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if kind != JSON:  # what a foreign web page may send without asking is never JSON
            raise _closing(415, "Validation", f"content-type: found '{kind[:80]}', expected {JSON}", "invalid")
        limit = self._service.settings.max_body_bytes
        length = exchange.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _closing(413, "Validation", f"the body has {length} bytes, the limit is {limit}", "body_size")
        parts, size = [], 0
        try:
            async with asyncio.timeout_at(exchange.deadline):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _HungUp
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _closing(413, "Validation", f"the body is above the limit of {limit} bytes", "body_size")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _closing(408, "Timeout", "the body did not arrive before the deadline", "deadline") from None

    def _parsed(self, content: bytes) -> Body:
        assert self._body is not None
        try:
            return self._body.model_validate_json(content)
        except ValidationError as error:
            raise invalid(_explain(error)) from None

    def _failure(self, exchange: Exchange, problem: Problem) -> Response:
        headers = {**problem.headers, **({"x-answered-by": exchange.answered_by} if exchange.answered_by else {})}
        status = self._statuses.get(problem.status, problem.status)
        return Response(orjson.dumps(self._shape(problem)), status, headers, JSON)

    def _told(self, exchange: Exchange, status: int, reason: str | None) -> None:
        service, seconds = self._service, time.perf_counter() - exchange.began
        service.metrics.answered(self.route, status, seconds, exchange.stages)
        if reason is not None:
            service.metrics.rejected(reason)
        if exchange.num_texts:
            service.metrics.embedded(exchange.key or "nobody", exchange.num_texts, exchange.num_tokens)
        known = {
            "request_id": exchange.id,
            "route": self.route,
            "status": status,
            "key": exchange.key,
            "texts": exchange.num_texts or None,
            "tokens": exchange.num_tokens or None,
            "lane": exchange.lane,
            "answered_by": exchange.answered_by,
            "reason": reason,
        }
        if self.route not in UNLOGGED or status >= 400:
            stages = {stage: round(1000 * value, 3) for stage, value in exchange.stages.items()}
            milliseconds = {"total": round(1000 * seconds, 3), **stages}
            service.log.request(**known, ms=milliseconds, trace_id=service.spans.trace_id(exchange.span))
        service.spans.end(exchange.span, exchange.stages, **known)


UNLOGGED = ("/health", "/metrics", "/ping")  # asked every few seconds by machines


class _HungUp(Exception):
    """The client is gone."""


def _closing(status: int, kind: str, message: str, reason: str) -> Problem:
    """The rest of the body is not read: the connection cannot be used again."""
    return Problem(status, kind, message, reason, {"connection": "close"})


async def _unless_hung_up(work: Awaitable[Response], receive: Receive) -> Response:
    """The response; the work is cancelled when the client hangs up before it is there."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise _HungUp from None
        raise
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong, without what was sent."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"the body is not JSON ({message.partition(':')[2].strip() or message})"
    more = error.error_count() - 1
    return f"{place}: {message[0].lower()}{message[1:]}" + (f" (and {more} more)" if more else "")
