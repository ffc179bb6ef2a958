"""The options of ``embed-corpus serve``: a YAML file, the environment and the command line, merged and checked.

The command line wins over the environment (``EMBED_CORPUS_SERVE_MAX_BATCH_SIZE=32``), the environment over the file,
the file over the defaults. Lists and mappings are JSON in the environment. An unknown name is an error that names the
nearest known one, in each of the three.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from pipeline.config import nearest
from pipeline.errors import ConfigError
from pipeline.serving.http_settings import HttpSettings

PREFIX = "EMBED_CORPUS_SERVE_"

QueryLane = Literal["auto", "onnx", "onnx-int8", "torch"]


class ServeSettings(HttpSettings):
    """Everything a server can be told; each description is its help text on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    service_name: str = Field(
        "embedding-model-serving-tei", min_length=1, description="name in traces, metrics and logs"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model: str | None = Field(None, description="a model without an output folder: embeds only, searches nothing")
    max_batch_size: int = Field(64, ge=1, description="texts computed at once")
    max_queue_delay_ms: float = Field(
        10.0, ge=0, description="a batch waits at most so long to fill up behind one that is being computed"
    )
    enable_gpu_ipc: bool = Field(
        False,
        description="hand embeddings from the encoder to the search process by CUDA IPC; needs a CUDA device, and a "
        "context on it for the search process, too",
    )
    cuda_graphs: bool = Field(
        True,
        description="on a GPU, compute a single text of up to 128 tokens by kernels that were recorded at the start, "
        "where they give the same vectors; ignored on a CPU",
    )
    max_batch_tokens: int | None = Field(
        None, ge=1, description="tokens computed at once; default: 512 on a CPU, 16,384 on a GPU"
    )
    max_concurrent_requests: int = Field(512, ge=1, description="calls that are in work or wait, all together")
    max_queue_tokens: int | None = Field(
        None, ge=1, description="tokens that may wait; default: what is computed in half of request_timeout_ms"
    )
    request_timeout_ms: float = Field(10_000, gt=0, description="deadline of a call that brings none")
    query_lane: QueryLane = Field(
        "auto",
        description="what computes short batches on a CPU; auto: ONNX Runtime where its vectors match the batch's; "
        "onnx-int8 is faster and changes vectors a little",
    )
    device: str = Field("auto", min_length=1, description="auto, cpu, cuda or cuda:N")
    warm_spare: bool | None = Field(
        None,
        description="keep a second process with the model loaded, which steps in when the first dies; default: where "
        "the model takes long to load, with torch alone",
    )
    threads: int | None = Field(None, ge=1, description="cores to compute with; default: all this process may use")


def load_settings(
    path: str | None, environ: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> ServeSettings:
    """The checked settings.

    Args:
        path: a YAML file, or None.
        environ: the environment; only names that begin with ``EMBED_CORPUS_SERVE_`` are read.
        options: what the command line gave; None means 'not given'.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value is wrong; the message says where.
    """
    known = list(ServeSettings.model_fields)
    given: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    sources = {
        f"--config {path}": {} if path is None else _file(path),
        "environment": _environment(environ),
        "command line": {name: value for name, value in (options or {}).items() if value is not None},
    }
    for source, values in sources.items():
        for name, value in values.items():
            if name not in known:
                shown = PREFIX + name.upper() if source == "environment" else name
                raise ConfigError(f"{source}: unknown option '{shown}'; {nearest(name, known)}")
            given[name], came_from[name] = value, source
    try:
        return ServeSettings(**given)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(one, came_from) for one in error.errors())) from None


def _file(path: str) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); expected a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"--config {path}: found a {type(document).__name__}, expected 'option: value' lines")
    return {str(key).replace("-", "_"): value for key, value in document.items()}


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        if value.lstrip()[:1] in ("[", "{"):
            try:
                values[name.removeprefix(PREFIX).lower()] = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"{name}: begins as JSON and is none ({error}); mend it") from None
        else:
            values[name.removeprefix(PREFIX).lower()] = value
    return values


def _explain(error: Any, came_from: Mapping[str, str]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    source = came_from.get(str(error["loc"][0]), "settings") if error["loc"] else "settings"
    if error["type"] == "extra_forbidden":
        return f"{source}: unknown option '{place}'"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    # A key is a secret, and a list or a mapping may hold one.
    is_plain = isinstance(error["input"], (str, int, float)) and "key" not in place.lower()
    return f"{source}: {place}: " + (f"found {error['input']!r}; {message}" if is_plain else message)
