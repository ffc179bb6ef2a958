"""OpenAI's routes for embeddings, as its clients speak them.

No prompt is put before a text, as there is no field for one there; ``prompt_name`` and ``truncate`` are ours and may be
sent beside the usual fields (``extra_body`` of the Python client).
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field, field_validator
from starlette.responses import Response

from pipeline.serving.exchange import JSON, Exchange, Problem
from pipeline.serving.service import Service
from pipeline.serving.tei_routes import text_list

STATUSES = {422: 400}  # OpenAI's word for what it does not take
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def openai_error(problem: Problem) -> dict[str, Any]:
    kind = TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": None, "code": problem.reason}}


class EmbeddingsRequest(BaseModel):
    """Body of ``/v1/embeddings``. Unknown fields are ignored: clients send more from version to version."""

    input: str | list[str] = Field(description="a text or a list of texts; token ids are refused")
    model: str | None = Field(None, description="any name; there is one model here, and the answer says which")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32")
    dimensions: int | None = Field(None, description="keep so many dimensions, renormalised (Matryoshka models)")
    user: str | None = Field(None, description="not used")
    prompt_name: str | None = Field(None, description="put this prompt before each text; default: none")
    truncate: bool | None = Field(None, description="cut texts above the length limit; false refuses them")

    texts = field_validator("input", mode="before")(text_list)


class OpenAiRoutes:
    """Handlers; see `exchange.Endpoint`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, exchange: Exchange, body: EmbeddingsRequest) -> Response:
        """A list of embeddings and what they used."""
        service = self._service
        texts = [body.input] if isinstance(body.input, str) else body.input
        service.check_batch("input", len(texts))
        service.check_shape(None, body.dimensions)
        prompt = service.prompt(body.prompt_name)
        vectors = await service.embed(exchange, texts, prompt=prompt, truncate=body.truncate)
        rows: Any = service.shaped(vectors, None, body.dimensions)
        if body.encoding_format == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode("ascii") for row in rows]
        document = {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
            "model": service.engine.info.model,
            "usage": {"prompt_tokens": exchange.num_tokens, "total_tokens": exchange.num_tokens},
        }
        return Response(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), 200, exchange.timing(), JSON)

    async def models(self, exchange: Exchange, _: None) -> Response:
        """The one model there is."""
        model = {"id": self._service.engine.info.model, "object": "model", "created": 0, "owned_by": "embed-corpus"}
        return Response(orjson.dumps({"object": "list", "data": [model]}), 200, media_type=JSON)
