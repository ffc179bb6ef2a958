"""Operations counted by hand on small modules; a rate that the machine really reaches."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.flops import ModelFacts, cpu_name, flops, linear_shapes, passed_parameters, peak
from pipeline.linear import PackedLinears
from tests.conftest import ROOT


class Tiny(nn.Module):
    """Tokens go through both products; the table and the pooler are passed by."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(8, 8)})
        self.config = SimpleNamespace(**config)


def test_operations_are_two_a_parameter_and_attention_by_length() -> None:
    # Texts of 2 and 4 tokens: 2 · 100 · 6 for the parameters, 4 · 5 · 3 · (2² + 4²) for attention.
    assert flops(6, 20, parameters=100, layers=3, width=5) == 1200 + 1200
    assert flops(0, 0, parameters=100, layers=3, width=5) == 0


def test_tables_and_poolers_are_not_passed() -> None:
    model = Tiny()
    assert passed_parameters(model) == (8 * 32 + 32) + 32 * 8 + 2 * 8
    assert linear_shapes(model) == [(8, 32), (32, 8)]


def test_packed_layers_count_as_before() -> None:
    model = Tiny()
    before = passed_parameters(model), linear_shapes(model)
    if not PackedLinears(model).num_packed:
        pytest.skip("torch has no packed linear layers here")
    assert (passed_parameters(model), linear_shapes(model)) == before


@pytest.mark.parametrize(
    ("config", "layers", "width"),
    [
        ({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}, 3, 8),
        ({"hidden_size": 8, "num_attention_heads": 2, "head_dim": 16, "num_hidden_layers": 3}, 3, 32),
        ({"hidden_size": 8, "num_attention_heads": 2, "head_dim": None, "num_hidden_layers": 3}, 3, 8),
        ({"hidden_size": 8}, 0, 8),
        ({}, 0, 0),
    ],
)
def test_facts_come_from_the_configuration(config: dict[str, Any], layers: int, width: int) -> None:
    model = Tiny(**config)
    assert ModelFacts.of(model) == ModelFacts(passed_parameters(model), layers, width, ((8, 32), (32, 8)))


def test_a_text_part_of_a_configuration_counts() -> None:
    text = SimpleNamespace(hidden_size=8, num_attention_heads=2, num_hidden_layers=3)
    facts = ModelFacts.of(Tiny(hidden_size=99, get_text_config=lambda: text))
    assert (facts.layers, facts.width) == (3, 8)


def test_products_in_other_layers_are_taken_as_usual() -> None:
    model = nn.Embedding(10, 8)
    model.config = SimpleNamespace(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)  # type: ignore[assignment]
    assert ModelFacts.of(model).shapes == ((8, 8), (8, 32), (32, 8))


def test_the_peak_is_a_rate_of_one_of_the_shapes() -> None:
    found = peak([(64, 64), (64, 256)], 256, "cpu", "float32", max_s=0.1)
    assert found["flops_per_s"] > 1e8
    assert found["shape"] in ([256, 64, 64], [256, 64, 256])
    assert found["kind"] in ("linear", "packed linear")


def test_a_short_peak_leaves_out_the_smallest_products(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = nn.Linear

    def noted(inputs: int, outputs: int) -> nn.Linear:
        seen.append((inputs, outputs))
        return real(inputs, outputs)

    monkeypatch.setattr(nn, "Linear", noted)
    with torch.inference_mode():
        peak([(64, 64), (512, 512)], 2048, "cpu", "bfloat16", max_s=1e-6)
    assert seen[0] == (512, 512)
    # The limit is over after the first one: at most it is noticed before the second is multiplied.
    assert seen in ([(512, 512)], [(512, 512), (64, 64)])


def test_a_machine_has_a_name() -> None:
    assert cpu_name() and cpu_name() == cpu_name().strip()


def test_importing_it_loads_no_torch() -> None:
    code = (
        "import sys, pipeline.flops, pipeline.tuning, pipeline.forecast\n"
        "print([name for name in ('torch', 'faiss', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"
