"""The routes as an OpenAPI document, and as a page that a person can read without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


@dataclass(frozen=True)
class Described:
    """A route, for people.

    Attributes:
        method, path: HTTP's.
        summary: one line.
        body: of the request, if it has one.
        open_to_all: needs no API key.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    open_to_all: bool = False


ANSWERS = {
    "200": "the answer",
    "400": "an empty list",
    "401": "no valid API key",
    "413": "body, batch or text too large",
    "422": "not what the route takes",
    "429": "overloaded; Retry-After says when to come back",
    "503": "nothing can compute or search now",
    "504": "the deadline passed (X-Request-Timeout-Ms)",
}


def document(routes: Sequence[Described], title: str, version: str, *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        routes: in the order to show.
        title, version: of the server.
        keys: whether an API key is needed.
    """
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    references, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {"summary": route.summary, "responses": {}}
        answers = ANSWERS if route.body is not None else {"200": ANSWERS["200"]}
        operation["responses"] = {status: {"description": text} for status, text in answers.items()}
        if route.body is not None:
            content = {"application/json": {"schema": references[(route.body, "validation")]}}
            operation["requestBody"] = {"required": True, "content": content}
        if keys and not route.open_to_all:
            operation["security"] = [{"key": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas.get("$defs", {})}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": components,
    }


def page(routes: Sequence[Described], title: str) -> str:
    """The same as HTML, without a script."""

    def fields(body: type[BaseModel]) -> str:
        rows = "".join(
            f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(field.description or '')}</td></tr>"
            for name, field in body.model_fields.items()
        )
        return f"<table>{rows}</table>"

    parts = "".join(
        f"<h2><code>{route.method} {html.escape(route.path)}</code></h2><p>{html.escape(route.summary)}</p>"
        + (fields(route.body) if route.body is not None else "")
        for route in routes
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}: routes</title></head><body><h1>{html.escape(title)}</h1>"
        f'<p><a href="/openapi.json">openapi.json</a> · <a href="/">search page</a></p>{parts}</body></html>'
    )
