"""Every way to compute attention, in every type it takes, on the device: equal to each text's own attention."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import numerics
from tests.gpu.numerics import Case

# What a driver or a CUDA library warns of says nothing about our numbers.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def all_of_them() -> list[object]:
    """Kinds innermost: the reference is computed once for all of them."""
    return [
        pytest.param(case, dtype, kind, id=f"{case}-{str(dtype).removeprefix('torch.')}-{kind}")
        for case in numerics.cases()
        for dtype in (torch.float32, *numerics.HALF)
        for kind in numerics.KINDS
        if dtype in numerics.dtypes_of(kind)
    ]


@pytest.mark.parametrize(("case", "dtype", "kind"), all_of_them())
def test_attention_on_the_device_is_each_texts_own(device: str, case: Case, dtype: torch.dtype, kind: str) -> None:
    reason = numerics.why_not(kind, device)
    if reason:
        pytest.skip(reason)
    found = numerics.measure(kind, case, dtype, device)
    assert numerics.passes(found, dtype), found


@pytest.mark.parametrize("dtype", numerics.HALF)
@pytest.mark.parametrize("kind", ["torch-varlen", "flash-attn"])
def test_a_text_has_the_same_bits_whatever_its_neighbours(device: str, kind: str, dtype: torch.dtype) -> None:
    """What ``num_splits=1`` promises; flash-attn 2 never splits without a paged cache."""
    reason = numerics.why_not(kind, device)
    if reason:
        pytest.skip(reason)
    together = Case(64, lengths=(4096, 513, 300, 7))
    states = numerics.make_states(together, dtype, device)
    found = numerics.attend(kind, *states, together)
    start = 0
    for length in together.lengths:
        alone = [s[:, :, start : start + length] for s in states]
        out = numerics.attend(kind, *alone, Case(64, lengths=(length,)))
        assert torch.equal(out, found[:, start : start + length]), length
        start += length


@pytest.mark.parametrize("kind", ["torch-varlen", "flash-attn", "grouped"])
def test_a_text_that_is_not_a_number_leaves_its_neighbours_alone(device: str, kind: str) -> None:
    """Kernels read whole tiles, beyond the end of a text: what they read there must not count, not even times 0."""
    reason = numerics.why_not(kind, device)
    if reason:
        pytest.skip(reason)
    case = Case(64, lengths=(200, 130, 70, 9))
    query, key, value = numerics.make_states(case, torch.float16, device)
    expected = numerics.reference(query, key, value, case)
    for states in (query, key, value):
        states[:, :, 200:330] = float("nan")
    out = numerics.attend(kind, query, key, value, case)
    kept = torch.cat([torch.arange(200), torch.arange(330, 409)]).to(device)
    found = numerics.difference(out[:, kept], expected[:, kept])
    assert numerics.passes(found, torch.float16), found
