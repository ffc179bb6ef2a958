"""``/search``: a question as text, or vectors, in; the nearest rows of the corpus out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.responses import Response

from pipeline.serving.exchange import JSON, Exchange, Problem, invalid
from pipeline.serving.service import Service


class SearchRequest(BaseModel):
    """Body of ``/search``; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    query: str | list[str] | list[float] | list[list[float]] = Field(
        description="a text, texts, a vector or vectors; a text gets the query prompt, a vector is taken as it is"
    )
    k: int = Field(10, ge=1, description="hits a query")
    filter: str | None = Field(
        None, description="what every hit meets, such as: pos = 'n' and (year >= 1990 or source in ('wn', 'wiki'))"
    )
    columns: list[str] | None = Field(None, description="columns to bring; default: all and the text; []: none")
    prompt_name: str | None = Field(None, description="another prompt than the query prompt")

    @field_validator("query", mode="before")
    @classmethod
    def _texts_or_vectors(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("expected a text, a list of texts, a vector or a list of vectors")
        kinds = {_kind(each) for each in value}
        if len(kinds) > 1 or "other" in kinds:
            raise ValueError("expected texts only, numbers only (one vector) or lists of numbers only (vectors)")
        if kinds == {"list"} and {_kind(number) for vector in value for number in vector} != {"number"}:
            raise ValueError("expected numbers in each vector")
        return value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "other"
    kinds = {str: "text", int: "number", float: "number", list: "list"}
    return kinds.get(type(value), "other")


class SearchRoutes:
    """Handlers; see `exchange.Endpoint`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def search(self, exchange: Exchange, body: SearchRequest) -> Response:
        """Hits of each query, best first, as `embed-corpus search --json` prints them."""
        service = self._service
        if service.search is None:
            raise Problem(404, "Validation", "a model alone is served here, there is no index to search", "no_index")
        if body.k > (limit := service.settings.max_hits):
            raise invalid(f"k: found {body.k}, expected at most {limit}")
        vectors = await self._vectors(exchange, body)
        began = time.perf_counter()  # the loop's own clock has whole milliseconds
        try:
            hits = await service.search.search(
                vectors,
                k=body.k,
                columns=body.columns,
                where=body.filter,
                deadline=exchange.deadline,
                in_ring=exchange.in_ring,
            )
        finally:
            exchange.stages["search"] = time.perf_counter() - began
        document = {
            "results": orjson.Fragment(hits.json),
            "generation": hits.generation,
            "warnings": hits.warnings,
            "milliseconds": {stage: round(1000 * value, 3) for stage, value in exchange.stages.items()},
        }
        return Response(orjson.dumps(document), 200, exchange.timing(), JSON)

    async def _vectors(self, exchange: Exchange, body: SearchRequest) -> Any:
        service, query = self._service, body.query
        is_one = isinstance(query, str) or (query and isinstance(query[0], float))
        many: list[Any] = [query] if is_one else list(query)
        service.check_batch("query", len(many))
        if isinstance(many[0], str):
            texts = [str(text) for text in many]
            prompt = service.prompt("query" if body.prompt_name is None else body.prompt_name)
            return await service.embed(exchange, texts, prompt=prompt, truncate=None)
        dim = service.engine.info.dim
        if (wrong := next((vector for vector in many if len(vector) != dim), None)) is not None:
            raise invalid(f"query: found a vector of {len(wrong)} dimensions, the index has {dim}")
        exchange.answered_by = service.settings.service_name
        return np.asarray(many, dtype=np.float32)
