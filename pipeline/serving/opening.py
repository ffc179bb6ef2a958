"""A finished output, or a model alone, into a running `Engine`: what is computed with, and on what."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import ledger
from pipeline.api import _same_model
from pipeline.cost_model import fit_cost
from pipeline.devices import num_gpus, resolve_devices, resolve_dtype
from pipeline.errors import ConfigError, Stopped
from pipeline.model import ModelFolder, open_model
from pipeline.records import EncoderSettings
from pipeline.serving.errors import EngineDown
from pipeline.serving.kit import Kit, kit_key, prepared
from pipeline.serving.lanes import ProcessLane
from pipeline.serving.settings import ServeSettings
from pipeline.storage import open_output
from pipeline.threads import available_cores
from pipeline.tokenizer import Tokenizer, TokenizerSpec

if TYPE_CHECKING:
    from pipeline.serving.engine import Engine

logger = logging.getLogger(__name__)

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 16_384
RING_ROWS = 4_096  # vectors on the device for the search process; older ones are sent as bytes


@dataclass(frozen=True)
class _Opened:
    """What is to be served.

    Attributes:
        name: of the model, as it was given to the run.
        model: the folder.
        model_files: its hashes.
        encoder: how the vectors are made, without a prompt.
        document_prompt, query_prompt: texts.
        fingerprint: of the run.
        stand_in: see `WorkerSettings`.
    """

    name: str
    model: ModelFolder
    model_files: dict[str, str]
    encoder: EncoderSettings
    document_prompt: str
    query_prompt: str
    fingerprint: str
    stand_in: str | None = None


async def open_engine(cls: type[Engine], output: str | None, settings: ServeSettings) -> Engine:
    """See `Engine.start`."""
    from pipeline.serving.engine import EngineInfo

    device = _device(settings)
    opened = _opened(output, settings, device)
    threads = settings.threads or available_cores()
    try:
        lanes, why, facts = await _lanes(opened, settings, device, threads)
    except EngineDown as error:
        raise Stopped(f"{error}; start the server again") from None
    engine = cls(
        EngineInfo(
            model=opened.name,
            model_path=str(opened.model.path),
            dim=facts["dim"],
            max_length=facts["tokenizer"]["max_length"],
            dtype=facts["dtype"],
            device=facts["device"] if device == "cpu" else device,
            pooling="+".join(facts["pooling"]),
            normalize=facts["normalize"],
            prompts=dict(opened.model.prompts),
            document_prompt=opened.document_prompt,
            query_prompt=opened.query_prompt,
            fingerprint=opened.fingerprint,
            lane=" + ".join(lane.name for lane in lanes) + (f" ({why})" if why else ""),
            attention=facts["attention"],
            parity={name: lanes[0].facts[name] for name in ("cosine", "difference") if name in lanes[0].facts},
        ),
        Tokenizer(TokenizerSpec(**facts["tokenizer"])),
        lanes,
        settings,
        max_batch_tokens=settings.max_batch_tokens or (CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS),
        # Lanes of one CPU share its cores. A GPU gets the next batch while it computes one.
        depth=1 if device == "cpu" else 2,
        pools_prompt=facts["pools_prompt"],
    )
    try:
        await engine.warm_up()
    except BaseException:
        await engine.close()
        raise
    return engine


def _device(settings: ServeSettings) -> str:
    devices = resolve_devices(settings.device, num_gpus())
    if "," in settings.device or (settings.device != "auto" and len(devices) > 1):
        raise ConfigError(f"device: found {settings.device}; a server computes on one, start one for each")
    device = devices[0]
    if settings.enable_gpu_ipc and device == "cpu":
        raise ConfigError(
            "enable_gpu_ipc: needs a CUDA device, the server computes on the CPU; set it to false: a pipe hands the "
            "vectors over then"
        )
    if device != "cpu" and settings.query_lane.startswith("onnx"):
        raise ConfigError(f"query_lane: {settings.query_lane} computes on a CPU, device is {device}; use auto")
    return device


def _opened(output: str | None, settings: ServeSettings, device: str) -> _Opened:
    if output is None:
        return _model_alone(settings, device)
    if settings.model is not None:
        raise ConfigError(f"model: {settings.model} given beside the output {output}, which has its own; leave it out")
    store = open_output(output)
    document = ledger.read_run(store)
    fields, trusted = document["fields"], document["config"]["trust_remote_code"]
    model = open_model(document["model"]["path"], trust_remote_code=trusted)
    _same_model(model, fields, store)
    encoder = EncoderSettings(
        model_path=str(model.path),
        device=device,
        # float32 stands in for a half type on a CPU: the same space, and half precision is slow there
        dtype="float32" if device == "cpu" else resolve_dtype(fields["dtype"], device, model.checkpoint_dtype),
        max_length=fields["max_length"],
        dimensions=fields["dimensions"],
        normalize=fields["normalize"],
        trust_remote_code=trusted,
    )
    return _Opened(
        document["model"]["name"],
        model,
        model.fingerprint_fields(),
        encoder,
        document_prompt=fields["prompt"],
        query_prompt=document["model"]["query_prompt"],
        fingerprint=document["fingerprint"],
        stand_in=fields.get("stand_in"),
    )


def _model_alone(settings: ServeSettings, device: str) -> _Opened:
    if settings.model is None:
        raise ConfigError("neither an output folder nor a model given; give one of them")
    model = open_model(settings.model)
    dtype = resolve_dtype("auto", device, model.checkpoint_dtype)
    files = model.fingerprint_fields()
    return _Opened(
        model.name,
        model,
        files,
        EncoderSettings(str(model.path), device=device, dtype=dtype),
        document_prompt=model.document_prompt(None, None),
        query_prompt=model.query_prompt(),
        fingerprint=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:32],
    )


async def _lanes(
    opened: _Opened, settings: ServeSettings, device: str, threads: int
) -> tuple[list[ProcessLane], str, dict[str, Any]]:
    """What computes, started; why ONNX Runtime does not, where it could; and the facts of the batch encoder."""
    asked = settings.query_lane
    if device != "cpu" or asked == "torch" or opened.stand_in is not None:
        lane = await _torch(opened, settings, device, threads, spare=settings.warm_spare is not False)
        return [lane], "", lane.facts
    try:
        onnx, kit = await _onnx(opened, threads, int8=asked == "onnx-int8")
    except ConfigError as error:
        if asked != "auto":
            raise ConfigError(f"query_lane: {asked}: {error}; use auto or torch") from None
        lane = await _torch(opened, settings, device, threads, spare=settings.warm_spare is not False)
        return [lane], f"no onnx: {error}", lane.facts
    if asked == "auto" and kit.torch_is_worth_it:
        try:
            torch = await _torch(opened, settings, device, threads, cost=_cost(kit, 3), spare=bool(settings.warm_spare))
        except BaseException:
            await onnx.close()
            raise
        return [onnx, torch], "", kit.facts
    return [onnx], "", kit.facts


async def _onnx(opened: _Opened, threads: int, *, int8: bool) -> tuple[ProcessLane, Kit]:
    """The ONNX lane, proven; ConfigError says why there is none."""
    for package in ("onnxruntime", "onnx"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: pip install 'embed-corpus[serve]'")
    prompts = [*opened.model.prompts.values(), opened.document_prompt, opened.query_prompt]
    key = kit_key(opened.model_files, opened.encoder, prompts, threads, int8=int8)
    kit = await prepared(key, opened.encoder, prompts, threads, int8=int8)
    if kit.reason:
        raise ConfigError(kit.reason)
    setup = {
        "do": "setup",
        "backend": "onnx",
        "graph": str(kit.graph(int8=int8)),
        "probes": str(kit.probes),
        "threads": threads,
        "int8": int8,
    }
    lane = ProcessLane("onnx-int8" if int8 else "onnx", setup, "cpu", threads, cost=_cost(kit, 2))
    await lane.start()
    return lane, kit


async def _torch(
    opened: _Opened,
    settings: ServeSettings,
    device: str,
    threads: int,
    *,
    cost: tuple[float, float, float] = (0.0, 0.0, 0.0),
    spare: bool,
) -> ProcessLane:
    # The process sees only its GPU, as the first one.
    encoder = replace(opened.encoder, device="cpu" if device == "cpu" else "cuda:0")
    setup = {
        "do": "setup",
        "backend": "torch",
        "encoder": {name: getattr(encoder, name) for name in encoder.__dataclass_fields__},
        "stand_in": opened.stand_in,
        "cuda_graphs": settings.cuda_graphs and device != "cpu",
        "ring_rows": max(RING_ROWS, 2 * settings.max_batch_size) if settings.enable_gpu_ipc else 0,
    }
    lane = ProcessLane("torch", setup, device, threads, cost=cost, spare=spare)
    await lane.start()
    for reason in lane.facts.get("cuda_graphs", {}).get("reasons", ()):
        logger.warning("cuda_graphs: %s; they take the normal path", reason)
    return lane


def _cost(kit: Kit, column: int) -> tuple[float, float, float]:
    rows = np.array([(row[0], row[1], 1.0, row[column]) for row in kit.timed])
    tokens, pairs, batch = fit_cost(rows)[0].tolist()
    return tokens, pairs, batch
