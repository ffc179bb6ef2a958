"""What a forward needs and what a machine can give, both in floating-point operations.

A model's need is counted from its shapes; a machine's limit is the rate of the best matrix product of those shapes.
Their quotient, by the seconds taken, says how much of the machine a run uses.

Importing this loads no torch; only what takes a model or measures does.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

SLICES, SLICE_S = 5, 0.4  # of each product
QUICK_SLICES = 3  # of each product where there is a time limit


def flops(num_tokens: float, sum_of_squared_lengths: float, parameters: int, layers: int, width: int) -> float:
    """Floating-point operations of one forward, padding not counted.

    A token passes each parameter outside the embedding tables once: 2 · parameters. In attention it meets each token of
    its text, once for the score and once for the sum: 4 · length · width a layer. Causal masks, sliding windows and
    mixtures of experts, which need less, are counted in full; norms, activations and pooling are left out.

    Args:
        num_tokens: of all texts.
        sum_of_squared_lengths: of all texts, in tokens.
        parameters: that each token passes, see `passed_parameters`.
        layers: with attention.
        width: of attention, heads × head size.
    """
    return 2.0 * parameters * num_tokens + 4.0 * layers * width * sum_of_squared_lengths


@dataclass(frozen=True)
class ModelFacts:
    """What `flops` and `peak` must know of a transformer; zeros where it is not known.

    Attributes:
        parameters: that each token passes.
        layers: with attention.
        width: of attention, heads × head size.
        shapes: (in, out) of each kind of linear layer.
    """

    parameters: int = 0
    layers: int = 0
    width: int = 0
    shapes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        """Of a transformers model; its class may come from the model folder and name things as it likes."""
        config: Any = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden = int(getattr(text, "hidden_size", 0) or 0)
        heads = int(getattr(text, "num_attention_heads", 0) or 0)
        width = heads * int(getattr(text, "head_dim", None) or hidden // heads) if heads else hidden
        # Some architectures have their products in layers of another class.
        usual = [(width, width), (width, 4 * width), (4 * width, width)] if width else []
        layers = int(getattr(text, "num_hidden_layers", 0) or 0)
        return cls(passed_parameters(model), layers, width, tuple(linear_shapes(model) or usual))


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


def peak(
    shapes: Sequence[Sequence[int]], tokens: int, device: str, dtype: str, *, max_s: float | None = None
) -> dict[str, Any]:
    """The best rate at which one of the shapes is multiplied.

    Each (tokens, in) × (in, out) product runs as torch's own linear layer and, on a CPU in float32, also as oneDNN's
    packed one: the limit must not depend on which of them we use.

    Args:
        shapes: (in, out) of the products, at least one.
        tokens: rows of each product.
        device: ``cpu``, ``cuda:0`` …
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        max_s: about how long it may take in all; products that there is no time for are left out, the smallest first.
            None takes ``SLICES`` · ``SLICE_S`` seconds a product, as a benchmark should.

    Returns:
        ``flops_per_s`` at 2 · tokens · in · out a product, the ``shape`` and the ``kind`` that reached it.
    """
    import torch
    from torch import nn

    from pipeline.linear import PackedLinears

    kinds = ["linear", "packed linear"] if device == "cpu" and dtype == "float32" else ["linear"]
    slices, slice_s = SLICES, SLICE_S
    if max_s is not None:
        # One slice's worth goes into finding out how many calls fill a slice.
        slices, slice_s = QUICK_SLICES, max_s / (len(shapes) * len(kinds) * (QUICK_SLICES + 1))
    start = time.perf_counter()
    best: dict[str, Any] = {"flops_per_s": 0.0}
    with torch.inference_mode():
        for inputs, outputs in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            layer = nn.Sequential(nn.Linear(inputs, outputs)).to(device, getattr(torch, dtype))
            states = torch.randn(tokens, inputs, device=device, dtype=getattr(torch, dtype))
            for kind in kinds:
                if max_s is not None and best["flops_per_s"] and time.perf_counter() - start > max_s:
                    return best
                if kind == "packed linear" and not PackedLinears(layer).num_packed:
                    continue
                limit_s = math.inf if max_s is None else slices * slice_s
                calls = _calls_per_s(lambda: layer(states), device, slices, slice_s, limit_s)  # noqa: B023
                rate = 2 * tokens * inputs * outputs * calls
                if rate > best["flops_per_s"]:
                    best = {"flops_per_s": rate, "shape": [tokens, inputs, outputs], "kind": kind}
    return best


def _calls_per_s(call: Callable[[], Any], device: str, slices: int, slice_s: float, limit_s: float) -> float:
    """Of the best of several slices; the first call of all is not counted.

    Fewer slices, at least one, where a single call is so long that all would take more than ``limit_s``.
    """
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
    while (seconds := timed(calls)) < slice_s / 4:
        calls *= 2
    calls = max(1, round(calls * slice_s / seconds))
    if calls == 1:
        slices = max(1, int(min(slices, limit_s / seconds)))
    return calls / min(timed(calls) for _ in range(slices))


def cpu_name() -> str:
    """As the kernel calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
