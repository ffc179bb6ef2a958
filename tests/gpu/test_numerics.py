"""The check that judges the GPU's attention, tried on a CPU: right attention passes it, each wrong one fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu import numerics
from tests.gpu.numerics import SHORT_LENGTHS, Case, attend, cases, difference, make_states, passes, reference

DEVICE = "cpu"


@pytest.mark.parametrize("case", cases(SHORT_LENGTHS), ids=str)
@pytest.mark.parametrize("kind", ["grouped", "padded"])
def test_right_attention_passes(case: Case, kind: str) -> None:
    found = numerics.measure(kind, case, torch.float32, DEVICE)
    assert passes(found, torch.float32), found


@pytest.mark.parametrize("dtype", numerics.HALF)
def test_rounding_to_half_precision_passes_its_own_limit_and_no_narrower_one(dtype: torch.dtype) -> None:
    found = numerics.measure("grouped", Case(64, causal=True, lengths=SHORT_LENGTHS), dtype, DEVICE)
    assert passes(found, dtype), found
    assert not passes(found, torch.float32), found


def test_the_reference_is_softmax_attention_within_each_text() -> None:
    case = Case(8, 4, 2, causal=True, window=3, lengths=(5, 4))
    query, key, value = make_states(case, torch.float64, DEVICE)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    expected = torch.zeros(1, 9, 4, 8, dtype=torch.float64)
    for head in range(4):
        for token in range(9):
            first = 0 if token < 5 else 5
            seen = range(max(first, token - 2), token + 1)
            scores = torch.stack([query[0, head, token] @ key[0, head, other] * case.scaling for other in seen])
            weights = scores.softmax(0)
            expected[0, token, head] = sum(w * value[0, head, o] for w, o in zip(weights, seen, strict=True))
    torch.testing.assert_close(reference(*make_states(case, torch.float64, DEVICE), case), expected)


# What a wrong kernel could do, as the case it would compute instead.
FAULTS: dict[str, Callable[[Case], Case]] = {
    "looks across texts": lambda case: replace(case, lengths=(case.lengths[0] + case.lengths[1], *case.lengths[2:])),
    "ends a text early": lambda case: replace(
        case, lengths=(case.lengths[0] - 1, case.lengths[1] + 1, *case.lengths[2:])
    ),
    "is causal": lambda case: replace(case, causal=True),
    "is not causal": lambda case: replace(case, causal=False),
    "forgets the window": lambda case: replace(case, window=None),
    "sees one key too many": lambda case: replace(case, window=numerics.WINDOW + 1),
    "sees one key too few": lambda case: replace(case, window=numerics.WINDOW - 1),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_attention_fails_even_the_widest_limit(fault: str) -> None:
    case = Case(64, causal=fault == "is not causal", window=numerics.WINDOW, lengths=SHORT_LENGTHS)
    states = make_states(case, torch.float32, DEVICE)
    found = difference(attend("grouped", *states, FAULTS[fault](case)), reference(*states, case))
    assert not passes(found, torch.bfloat16), found


def wrongly_scaled(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    return attend("grouped", query / 1.5, key, value, case)


def with_mixed_up_heads(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Query head i takes key head i modulo their number, instead of i divided by the group size."""
    order = [0, 2, 1, 3]
    return attend("grouped", query[:, order], key, value, case)[:, :, order]


def with_a_stale_tail(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """The last token is never written."""
    out = attend("grouped", query, key, value, case)
    out[:, -1] = 0
    return out


def not_a_number(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    out = attend("grouped", query, key, value, case)
    out[0, 3, 0, 0] = float("nan")
    return out


@pytest.mark.parametrize("wrong", [wrongly_scaled, with_mixed_up_heads, with_a_stale_tail, not_a_number])
def test_wrong_numbers_fail_even_the_widest_limit(wrong: Callable[..., Tensor]) -> None:
    case = Case(64, 4, 2, lengths=SHORT_LENGTHS)
    states = make_states(case, torch.float32, DEVICE)
    found = difference(wrong(*states, case), reference(*states, case))
    assert not passes(found, torch.bfloat16), found


def test_a_kernel_that_fails_is_a_row_that_says_so() -> None:
    row = numerics.as_row("torch-varlen", Case(64, lengths=(3, 2)), torch.bfloat16, DEVICE)
    assert row["ok"] is False
    assert row["error"].startswith("NotImplementedError")


def test_what_cannot_run_here_has_a_reason() -> None:
    assert numerics.why_not("grouped", DEVICE) == numerics.why_not("padded", DEVICE) == ""
    assert numerics.why_not("torch-varlen", DEVICE) == numerics.why_not("flash-attn", DEVICE) == "needs a CUDA device"
