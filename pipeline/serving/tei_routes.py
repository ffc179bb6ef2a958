"""The routes of Hugging Face's Text Embeddings Inference, as its clients speak them.

As there, ``/embed`` puts no prompt before a text unless ``prompt_name`` names one, and what is too long is cut unless
``truncate`` is false. ``document`` and ``query`` name the prompts that this output's documents and queries have.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field, ValidationInfo, field_validator
from starlette.responses import Response

from pipeline.serving.errors import TooLong
from pipeline.serving.exchange import JSON, Exchange, Problem, invalid
from pipeline.serving.metrics import CONTENT_TYPE
from pipeline.serving.service import Service

INLINE_CHARS = 2_000  # tokenized faster than handed to a thread


def text_list(value: Any, info: ValidationInfo) -> Any:
    """One text or a list of texts, told apart from token ids and from what is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a text or a list of texts")
    for index, text in enumerate(value):
        if isinstance(text, (int, list)) and not isinstance(text, bool):
            raise ValueError(
                "found token ids, which depend on the tokenizer they come from; send texts "
                "(langchain_openai.OpenAIEmbeddings: check_embedding_ctx_length=False)"
            )
        if not isinstance(text, str):
            raise ValueError(f"number {index} is not a text")
    return value


class EmbedRequest(BaseModel):
    """Body of ``/embed``. Unknown fields are ignored, as TEI does."""

    inputs: str | list[str] = Field(description="a text or a list of texts")
    normalize: bool | None = Field(None, description="vectors of unit length; default: as the batch run stored them")
    truncate: bool | None = Field(None, description="cut texts above the length limit; false refuses them")
    truncation_direction: Literal["left", "right", "Left", "Right"] = Field("Right", description="which end is cut")
    prompt_name: str | None = Field(None, description="put this prompt before each text; default: none")
    dimensions: int | None = Field(None, description="keep so many dimensions, renormalised (Matryoshka models)")

    texts = field_validator("inputs", mode="before")(text_list)


class TokenizeRequest(BaseModel):
    """Body of ``/tokenize``."""

    inputs: str | list[str] = Field(description="a text or a list of texts")
    add_special_tokens: bool = Field(True, description="show the tokens that are put around a text, too")
    prompt_name: str | None = Field(None, description="put this prompt before each text; default: none")

    texts = field_validator("inputs", mode="before")(text_list)


class TeiRoutes:
    """Handlers; see `exchange.Endpoint`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embed(self, exchange: Exchange, body: EmbedRequest) -> Response:
        """A list of vectors, also for one text."""
        service = self._service
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        service.check_batch("inputs", len(texts))
        service.check_shape(body.normalize, body.dimensions)
        prompt, truncate = service.prompt(body.prompt_name), body.truncate
        if is_left := body.truncation_direction.lower() == "left":
            truncate = False
        try:
            vectors = await service.embed(exchange, texts, prompt=prompt, truncate=truncate)
        except TooLong:
            if is_left and body.truncate is not False:
                raise invalid("truncation_direction: this server cuts on the right only, as the batch run") from None
            raise
        content = orjson.dumps(
            service.shaped(vectors, body.normalize, body.dimensions), option=orjson.OPT_SERIALIZE_NUMPY
        )
        return Response(content, 200, exchange.timing(), JSON)

    async def tokenize(self, exchange: Exchange, body: TokenizeRequest) -> Response:
        """The tokens of each text, nothing cut off."""
        service = self._service
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        service.check_batch("inputs", len(texts))
        prompt = service.prompt(body.prompt_name)
        if sum(map(len, texts)) <= INLINE_CHARS:
            tokens = service.engine.tokenize(texts, prompt)
        else:
            tokens = await asyncio.to_thread(service.engine.tokenize, texts, prompt)
        shown = [[asdict(token) for token in each if body.add_special_tokens or not token.special] for each in tokens]
        return Response(orjson.dumps(shown), 200, exchange.timing(), JSON)

    async def info(self, exchange: Exchange, _: None) -> Response:
        """What is served, and how."""
        return Response(orjson.dumps(self._service.about()), 200, media_type=JSON)

    async def health(self, exchange: Exchange, _: None) -> Response:
        """200 while texts can be embedded."""
        if not self._service.engine.is_up:
            raise Problem(503, "Unhealthy", "unhealthy", "down")
        return Response(status_code=200)

    async def metrics(self, exchange: Exchange, _: None) -> Response:
        """For Prometheus."""
        return Response(self._service.metrics.text(), 200, media_type=CONTENT_TYPE)
