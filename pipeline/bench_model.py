"""What a benchmark must know of model and machine, each found out in a process of its own: facts, peak, host-only run.

``python -m pipeline.bench_model WHAT JSON`` answers with JSON on stdout. WHAT is one of

    facts       the model's size, and how many tokens each text of a shard has
    peak        how fast this machine multiplies matrices of the model's shapes
    host-only   the run with an encoder that returns at once: all that is not the forward
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EmbedCorpusError
from pipeline.records import Batch, EncoderSettings, Shard
from pipeline.tokenizer import Tokenizer, TokenizerSpec

if TYPE_CHECKING:
    from torch import nn

STAND_IN = "pipeline.bench_model:make"
POOL_ROWS = 4_096
SLICES, SLICE_S = 5, 0.4


class HostOnly:
    """Stands in for the encoder: its tokenizer, batches and dimensions are the real model's, its vectors are made up.

    They are random, as real ones look to a compressor, and cost a copy. A run with it has ``stand_in`` in its
    fingerprint, so a real run never continues one.

    Args:
        settings: as for the real encoder, which is loaded for what it says of itself and then dropped.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        from pipeline.encoder import Encoder

        real = Encoder.load(settings)
        self.dim, self.attention, self.attention_reason = real.dim, real.attention, real.attention_reason
        self.device, self.dtype, self.num_parameters = real.device, real.dtype, real.num_parameters
        self.padded = real.padded
        self._spec = real.tokenizer_spec()
        vectors = np.random.default_rng(0).standard_normal((POOL_ROWS, self.dim), dtype=np.float32)
        self._vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        self._next = 0

    def tokenizer_spec(self) -> TokenizerSpec:
        return self._spec

    def encode(self, batch: Batch) -> NDArray[np.float32]:
        """(num_texts, dim) float32 of no meaning."""
        rows = (self._next + np.arange(batch.num_texts)) % POOL_ROWS
        self._next += batch.num_texts
        vectors: NDArray[np.float32] = self._vectors[rows]
        return vectors

    def computed_tokens(self, batch: Batch) -> int:
        return batch.num_texts * batch.max_seqlen if self.padded else batch.num_tokens


def make(settings: EncoderSettings) -> HostOnly:
    return HostOnly(settings)


def host_only(shard: str, output: str, model: str, device: str) -> dict[str, Any]:
    """The report of a run whose vectors mean nothing."""
    from pipeline.config import build_config
    from pipeline.run import run

    options = {"input": shard, "output": output, "model": model, "id_column": "id", "devices": device, "index": "none"}
    return run(build_config(None, options), stand_in=STAND_IN).to_dict()


def facts(shard: str, model: str, device: str, dtype: str) -> dict[str, Any]:
    """Size and shapes of the model, and the length of each text as the model is given it.

    Returns:
        ``parameters`` that each token passes: all but embedding tables and the pooler; ``layers``; ``width`` of
        attention (heads × head size); ``shapes``: (in, out) of each kind of linear layer; ``lengths`` in tokens of all
        rows; ``computed``: of the texts ``embed-corpus run`` computes, a repeated one once a window; ``versions``.
    """
    import sentence_transformers
    import torch

    from pipeline.encoder import Encoder
    from pipeline.loader import load_sentence_transformer
    from pipeline.model import open_model

    prompt = open_model(model).document_prompt(None, None)
    settings = EncoderSettings(model_path=model, device=device, dtype=dtype, prompt=prompt)
    lengths, computed = token_lengths(shard, Tokenizer(Encoder.load(settings).tokenizer_spec()))
    loaded: Any = load_sentence_transformer(Path(model), "cpu", torch.float32, trust_remote_code=False)
    transformer = loaded[0].model
    config = transformer.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    return {
        "parameters": passed_parameters(transformer),
        "layers": int(config.num_hidden_layers),
        "width": int(width),
        "shapes": linear_shapes(transformer) or [(width, width), (width, 4 * width), (4 * width, width)],
        "lengths": lengths.tolist(),
        "computed": computed.tolist(),
        "gpu": name,
        "versions": {"torch": torch.__version__, "sentence-transformers": sentence_transformers.__version__},
    }


def token_lengths(shard: str, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(num_rows,) tokens of each row, and (n,) of each text that a run computes: the different ones of each window."""
    from pipeline.reader import read_windows
    from pipeline.shards import Columns
    from pipeline.worker import distinct

    rows, once = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for window in read_windows(Shard("bench", shard, 0, 0), Columns("text", "id"), "id"):
        texts, text_of_row = distinct(window.texts)
        lengths = tokenizer.encode(texts).lengths.astype(np.int64)
        once.append(lengths)
        rows.append(lengths[text_of_row])
    return np.concatenate(rows), np.concatenate(once)


def passed_parameters(model: nn.Module) -> int:
    """Parameters outside embedding tables and the pooler, which sees one token a text or is not used at all."""
    from torch import nn

    own = {
        id(parameter): parameter.numel()
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding) and "pooler" not in name.split(".")
        for parameter in module.parameters(recurse=False)
    }
    return sum(own.values())


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(in, out) of the linear layers that each token passes, each shape once."""
    from torch import nn

    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return sorted({(m.in_features, m.out_features) for name, m in named if "pooler" not in name.split(".")})


def peak(shapes: list[list[int]], tokens: int, device: str, dtype: str) -> dict[str, Any]:
    """The best rate at which one of the shapes is multiplied for at least ``SLICE_S`` seconds.

    Each (tokens, in) × (in, out) product runs as torch's own linear layer and, on a CPU in float32, also as oneDNN's
    packed one: the limit must not depend on which of them we use.

    Returns:
        ``flops_per_s`` at 2 · tokens · in · out a product, the ``shape`` and the ``kind`` that reached it.
    """
    import torch
    from torch import nn

    from pipeline.linear import PackedLinears

    best: dict[str, Any] = {"flops_per_s": 0.0}
    with torch.inference_mode():
        for inputs, outputs in shapes:
            layer = nn.Sequential(nn.Linear(inputs, outputs)).to(device, getattr(torch, dtype))
            states = torch.randn(tokens, inputs, device=device, dtype=getattr(torch, dtype))
            kinds = ["linear", "packed linear"] if device == "cpu" and dtype == "float32" else ["linear"]
            for kind in kinds:
                if kind == "packed linear" and not PackedLinears(layer).num_packed:
                    continue
                rate = 2 * tokens * inputs * outputs * _calls_per_s(lambda: layer(states), device)  # noqa: B023
                if rate > best["flops_per_s"]:
                    best = {"flops_per_s": rate, "shape": [tokens, inputs, outputs], "kind": kind}
    return best


def _calls_per_s(call: Callable[[], Any], device: str) -> float:
    """Of the best of several slices; the first call of all is not counted."""
    import torch

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed(1)
    calls = 1
    while (seconds := timed(calls)) < SLICE_S / 4:
        calls *= 2
    calls = max(1, round(calls * SLICE_S / seconds))
    return calls / min(timed(calls) for _ in range(SLICES))


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up in the answer
    what, given = sys.argv[1], json.loads(sys.argv[2])
    kinds: dict[str, Callable[..., dict[str, Any]]] = {"facts": facts, "peak": peak, "host-only": host_only}
    try:
        answer = kinds[what](**given)
    except EmbedCorpusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with answers:
        json.dump(answer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
