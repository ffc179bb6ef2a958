from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pipeline.linear import PackedLinears


class Intermediate(nn.Module):
    """What BERT and its relatives have between attention and output."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(48, 96)
        self.intermediate_act_fn = activation

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.intermediate_act_fn(self.dense(states))
        return out


STATES = torch.linspace(-8, 8, 5 * 48).reshape(5, 48)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_packed_layers_give_the_same_numbers_and_only_the_exact_gelu_is_fused(activation: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Intermediate(ACT2FN[activation]), nn.Linear(96, 48, bias=False))
    expected = model(STATES)
    assert PackedLinears(model).num_packed == 2
    torch.testing.assert_close(model(STATES), expected, rtol=1e-5, atol=1e-5)
    intermediate = model[0]
    assert isinstance(intermediate, Intermediate)
    assert isinstance(intermediate.intermediate_act_fn, nn.Identity) == (activation == "gelu")


def test_undo_brings_back_every_layer_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Intermediate(ACT2FN["gelu"]), nn.Linear(96, 48))
    expected, kinds = model(STATES), [type(module) for module in model.modules()]
    PackedLinears(model).undo()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(STATES), expected)


def test_a_weight_that_is_used_twice_stays_plain() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(96, 48), "head": nn.Linear(48, 96)})
    head, embedding = model["head"], model["embedding"]
    assert isinstance(head, nn.Linear)
    assert isinstance(embedding, nn.Embedding)
    head.weight = embedding.weight
    assert PackedLinears(model).num_packed == 0
