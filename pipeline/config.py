"""What the user asked for: options of the command line and of a job file, merged and checked, nothing resolved yet.

A job file is YAML with the long option names as keys (``text-column`` or ``text_column``) and ``input`` for the
positional argument. What stands on the command line wins over the file, the file over the defaults. An unknown key is
an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.errors import ConfigError

Attention = Literal["auto", "torch-varlen", "flash-attn", "grouped", "padded"]


class RunConfig(BaseModel):
    """The options of ``embed-corpus run``; each field's description is its help text on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    input: list[str] = Field(min_length=1, description="Parquet file, folder (recursive) or glob")
    output: str = Field(min_length=1, description="folder for embeddings, ledger and index; re-running continues it")
    model: str = Field(min_length=1, description="a sentence-transformers folder, or a model id in the hub cache")
    text_column: str = Field("text", min_length=1, description="column to embed; a dotted path reaches into a struct")
    id_column: str | None = Field(None, description="key of each row; default: '<shard>:<row>' as column 'id'")
    columns: list[str] = Field([], description="columns carried through to the output, comma separated")
    prompt: str | None = Field(None, description="text put before each document")
    prompt_name: str | None = Field(None, description="name of a prompt of the model; default: as encode_document")
    max_length: int | None = Field(None, ge=1, description="token limit a text; default: the model's")
    dimensions: int | None = Field(None, ge=1, description="keep the first N dimensions, renormalised (Matryoshka)")
    normalize: bool | None = Field(None, description="L2-normalise; default: as the model folder says")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="compute type; auto: float32 on a CPU, the checkpoint's half type on a GPU"
    )
    embedding_dtype: Literal["float32", "float16"] = Field(
        "float32", description="stored type; float16 halves the files and rounds to 3 decimal digits"
    )
    devices: str = Field("auto", description="auto, cpu, cpu,cpu, cuda, cuda:0,cuda:1: one worker process each")
    backend: Literal["local", "ray"] = Field(
        "local", description="where the workers run: on this machine, or on the nodes of a Ray cluster"
    )
    attention: Attention = Field("auto", description="auto picks the fastest one that passes the load-time probe")
    max_batch_tokens: int | None = Field(
        None, ge=1, description="tokens computed at once; default: measured, about 2,048 on a CPU and 32,768 on a GPU"
    )
    tokenizer_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="tokenizer processes a device; auto: none on a CPU, on a GPU what the cores allow"
    )
    compile: bool = Field(False, description="put the model through torch.compile: for small models on a GPU")
    index: str = Field("auto", min_length=1, description="auto, none, or a FAISS factory string")
    max_index_ram: str | None = Field(
        None, description="memory the index may take, such as 8GB; default: half of what is granted here"
    )
    min_recall: float = Field(0.95, ge=0, le=1, description="recall@10 below which no index is published")
    max_latency_ms: float | None = Field(None, gt=0, description="median time of a search, one thread")
    metric: Literal["ip", "l2"] | None = Field(None, description="for vectors that are not normalised; default: ip")
    long_texts: Literal["truncate", "chunk"] = Field(
        "truncate", description="texts above the limit: cut and counted, or one output row for each overlapping piece"
    )
    chunk_overlap: int | None = Field(None, ge=0, description="tokens that pieces share; default: an eighth")
    prune: bool = Field(False, description="remove the output of shards that are no longer in the input")
    verify: bool = Field(False, description="prove the output in the end, as 'embed-corpus verify' does")
    rank: int | None = Field(None, ge=0, description="which of --world-size processes this is, from 0")
    world_size: int | None = Field(None, ge=1, description="how many processes share the shards, on any machines")
    max_tokens: int | None = Field(None, ge=1, description="stop before a shard once so many tokens are computed")
    max_cost: float | None = Field(None, gt=0, description="stop before a shard once it has cost so much")
    max_hours: float | None = Field(None, gt=0, description="stop before a shard after so many hours")
    price_per_hour: float | None = Field(None, ge=0, description="of this machine with all its devices")
    trust_remote_code: bool = Field(False, description="run Python code that the model folder brings")

    @field_validator("input", mode="before")
    @classmethod
    def _one_input_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("columns", mode="before")
    @classmethod
    def _comma_separated(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [name.strip() for name in value.split(",") if name.strip()]
        return [] if value is None else value

    @model_validator(mode="after")
    def _one_prompt(self) -> RunConfig:
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("prompt and prompt-name exclude each other: give one")
        if self.max_cost is not None and not self.price_per_hour:
            raise ValueError("--max-cost needs --price-per-hour: give both")
        if self.chunk_overlap is not None and self.long_texts != "chunk":
            raise ValueError("--chunk-overlap goes with --long-texts chunk: give both or neither")
        return self


def nearest(name: str, known: list[str]) -> str:
    """', did you mean …?' with the known name closest to ``name``, or the list of all when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


def read_job(path: str) -> dict[str, Any]:
    """The keys of a job file with ``-`` turned into ``_``.

    Raises:
        ConfigError: the file is missing, is not YAML, or has a key no option is called.
    """
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--job {path}: cannot be read ({error.strerror}); expected a YAML file of options") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--job {path}: not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        raise ConfigError(f"--job {path}: the file is empty; expected 'option: value' lines")
    if not isinstance(document, Mapping):
        raise ConfigError(f"--job {path}: found a {type(document).__name__}, expected 'option: value' lines")
    known = list(RunConfig.model_fields)
    job = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--job {path}: unknown key '{key}'; {nearest(name, known).replace('_', '-')}")
        job[name] = value
    return job


def build_config(job: str | None, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> RunConfig:
    """The checked configuration of a job file and the options given beside it.

    Args:
        job: path of a job file, or None.
        options: what was given explicitly; None means 'not given'.
        defaults: for what neither gives.

    Raises:
        ConfigError: a value is missing, of the wrong kind, or contradicts another; the message names the option.
    """
    given = {name: value for name, value in options.items() if value is not None and value != []}
    # A prompt given on the command line must be able to replace a prompt name of the job file, and the other way round.
    file = read_job(job) if job else {}
    if "prompt" in given:
        file.pop("prompt_name", None)
    if "prompt_name" in given:
        file.pop("prompt", None)
    try:
        return RunConfig(**{**(defaults or {}), **file, **given})
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None


def _explain(error: Any) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    label = "INPUT" if name == "input" else "--" + name.replace("_", "-")
    if error["type"] == "missing":
        return f"{label} is missing: give it on the command line or in the job file"
    if error["type"] == "extra_forbidden":
        return f"unknown option '{name}'; {nearest(name, list(RunConfig.model_fields))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if not name else f"{label}: found {error['input']!r}; {message[0].lower()}{message[1:]}"
