"""The routes of a server, as an ASGI application over a `Service`.

POST /embed, /          TEI                 POST /search            the nearest rows
POST /v1/embeddings     OpenAI              GET  /                  the search page
POST /tokenize          TEI                 GET  /docs, /openapi.json
GET  /info, /health, /metrics, /v1/models
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipeline.serving import openapi
from pipeline.serving.exchange import JSON, Endpoint, ErrorShape, Exchange, tei_error
from pipeline.serving.metrics import OTHER
from pipeline.serving.openai_routes import STATUSES, EmbeddingsRequest, OpenAiRoutes, openai_error
from pipeline.serving.openapi import Described
from pipeline.serving.search_routes import SearchRequest, SearchRoutes
from pipeline.serving.service import Service
from pipeline.serving.tei_routes import EmbedRequest, TeiRoutes, TokenizeRequest

HTML = "text/html; charset=utf-8"
ROUTES = (
    Described("POST", "/embed", "Vectors of texts (TEI); POST / is the same.", EmbedRequest),
    Described("POST", "/search", "The rows of the corpus nearest to a text or a vector.", SearchRequest),
    Described("POST", "/v1/embeddings", "Vectors of texts (OpenAI).", EmbeddingsRequest),
    Described("POST", "/tokenize", "The tokens of texts (TEI).", TokenizeRequest),
    Described("GET", "/info", "Model, dimensions, prompts, limits, fingerprint, index and fallbacks."),
    Described("GET", "/v1/models", "The model's name (OpenAI)."),
    Described("GET", "/metrics", "For Prometheus."),
    Described("GET", "/health", "200 while texts can be embedded.", open_to_all=True),
)

Handler = Callable[[Exchange, Any], Awaitable[Response]]


def build_app(service: Service) -> Starlette:
    """All routes over one service, which somebody else starts and stops."""
    tei, openai, search, pages = TeiRoutes(service), OpenAiRoutes(service), SearchRoutes(service), _Pages(service)
    handlers: dict[str, Handler] = {
        "/embed": tei.embed,
        "/search": search.search,
        "/v1/embeddings": openai.embeddings,
        "/tokenize": tei.tokenize,
        "/info": tei.info,
        "/v1/models": openai.models,
        "/metrics": tei.metrics,
        "/health": tei.health,
    }

    def route(method: str, path: str, endpoint: Endpoint[Any]) -> Route:
        return Route(path, endpoint, methods=[method])

    routes, endpoints = [], {}
    for each in ROUTES:
        is_openai = each.path.startswith("/v1/")
        shape: ErrorShape = openai_error if is_openai else tei_error
        endpoint: Endpoint[Any] = Endpoint(
            service,
            each.path,
            handlers[each.path],
            each.body,
            shape=shape,
            statuses=STATUSES if is_openai else {},
            open_to_all=each.open_to_all,
        )
        routes.append(route(each.method, each.path, endpoint))
        endpoints[each.path] = endpoint
    # huggingface_hub's client, given the address alone, posts to it as it is.
    routes.append(route("POST", "/", endpoints["/embed"]))
    routes.append(route("POST", "/embeddings", endpoints["/v1/embeddings"]))
    routes.append(route("GET", "/ping", endpoints["/health"]))
    for path, handler in (("/", pages.search), ("/docs", pages.routes), ("/openapi.json", pages.openapi)):
        routes.append(route("GET", path, Endpoint(service, path, handler, open_to_all=True)))

    async def not_here(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        service.metrics.answered(OTHER, error.status_code, 0.0, {})
        document = {"error": f"{request.method} {request.url.path[:200]}: {error.detail}; see /docs"}
        content = orjson.dumps({**document, "error_type": "Validation"})
        return Response(content, error.status_code, error.headers, JSON)

    return Starlette(routes=routes, exception_handlers={HTTPException: not_here})


class _Pages:
    """What a browser asks for; nothing on these pages comes from another server."""

    def __init__(self, service: Service) -> None:
        name, version = service.settings.service_name, service.engine.info.version
        page = resources.files("pipeline.serving").joinpath("page.html").read_text(encoding="utf-8")
        self._search = self._html(page)
        self._routes = self._html(openapi.page(ROUTES, name))
        document = openapi.document(ROUTES, name, version, keys=bool(service.keys.names))
        self._openapi: tuple[bytes, dict[str, str], str] = (orjson.dumps(document), {}, JSON)

    def _html(self, page: str) -> tuple[bytes, dict[str, str], str]:
        return page.encode(), {"content-security-policy": policy(page), **PLAIN}, HTML

    async def search(self, exchange: Exchange, _: None) -> Response:
        return self._response(self._search)

    async def routes(self, exchange: Exchange, _: None) -> Response:
        return self._response(self._routes)

    async def openapi(self, exchange: Exchange, _: None) -> Response:
        return self._response(self._openapi)

    def _response(self, content: tuple[bytes, dict[str, str], str]) -> Response:
        body, headers, kind = content
        return Response(body, 200, headers, kind)


PLAIN = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def policy(page: str) -> str:
    """A Content-Security-Policy under which the page's own script and style run and nothing else is loaded."""

    def sources(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        sums = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
        return " ".join(f"'sha256-{each}'" for each in sums) or "'none'"

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'; "
        "img-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
