"""The options of the HTTP side of ``serve``: limits, keys, fallbacks. The engine's options inherit from them.

Nothing is read from files or the environment here.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

KEY_NAME = r"^[A-Za-z0-9_.-]{1,64}$"  # a label of metrics


class Upstream(BaseModel):
    """Another server that may answer in our place, once its vectors were found to be ours."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    url: str = Field(description="its address, such as http://10.0.0.7:8080")
    api: Literal["embed-corpus", "tei", "openai"] = Field("embed-corpus", description="what it speaks")
    name: str | None = Field(None, description="in answers and metrics; default: host and port of the address")
    model: str = Field("", description="asked for by name, where the API wants one")
    api_key: SecretStr | None = Field(None, description="sent as a bearer token")
    max_requests_per_s: float = Field(20.0, gt=0, description="budget; above it the next one is tried")
    max_client_batch_size: int = Field(32, ge=2, description="texts it takes at once")

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("expected an address such as http://10.0.0.7:8080")
        return value.rstrip("/")

    @property
    def label(self) -> str:
        """Who it is, in one word; without user and password, should the address have them."""
        return self.name or urlsplit(self.url).netloc.rpartition("@")[2]


class HttpSettings(BaseModel):
    """Options of the HTTP side; each field's description is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    max_client_batch_size: int = Field(32, ge=1, description="texts or queries in one request")
    max_body_bytes: int = Field(2_000_000, ge=1_000, description="of a request, refused before it is read")
    max_connections: int = Field(1_024, ge=1, description="open at once; one more is answered with 503")
    max_hits: int = Field(1_000, ge=1, description="largest k of a search")
    auto_truncate: bool = Field(True, description="cut texts above the length limit where the request does not say")
    api_keys: dict[Annotated[str, Field(pattern=KEY_NAME)], SecretStr] = Field(
        {}, description="name: key. Without any, everybody may ask; names appear in metrics and logs, keys never"
    )
    price_per_million_tokens: float | None = Field(None, ge=0, description="adds the cost by API key to the metrics")
    access_log: bool = Field(True, description="a JSON line on stderr for each request, without its texts")
    drain_timeout_s: float = Field(20.0, ge=0, description="on SIGTERM, for what is in flight")
    index_poll_s: float = Field(2.0, gt=0, description="how often a new generation of the index is looked for")
    index_cache_bytes: int = Field(256 << 20, ge=0, description="memory for ids and carried columns of hits")
    fallbacks: list[Upstream] = Field([], description="asked in this order when this server cannot answer")
    fallback_after_ms: int | None = Field(None, ge=1, description="own attempt at most; default: half of the deadline")
    fallback_recheck_s: float = Field(300.0, gt=0, description="how often an upstream's vectors are compared again")
    fallback_failures: int = Field(3, ge=1, description="in a row; then an upstream is left alone for a while")
    fallback_pause_s: float = Field(30.0, gt=0, description="that while; then its vectors are compared first")

    @field_validator("api_keys")
    @classmethod
    def _no_empty_keys(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, key in value.items():
            if len(key.get_secret_value()) < 8:
                raise ValueError(f"the key named '{name}' is shorter than 8 characters")
        if len({key.get_secret_value() for key in value.values()}) < len(value):
            raise ValueError("two names have the same key")
        return value

    @field_validator("fallbacks")
    @classmethod
    def _told_apart(cls, value: list[Upstream]) -> list[Upstream]:
        if len({upstream.label for upstream in value}) < len(value):
            raise ValueError("two fallbacks have the same name")
        return value
