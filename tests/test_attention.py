from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import attention
from pipeline.attention import Packed, choose_kinds, packed_attention
from pipeline.errors import ModelError

LENGTHS = [9, 9, 5, 1, 1, 1]


class Layer(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def make_packed(kind: str = "grouped", lengths: list[int] = LENGTHS) -> Packed:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    runs = tuple((len(list(run)), length) for length, run in groupby(lengths))
    return Packed(kind, runs, cu_seqlens, max(lengths))


def make_states(num_heads: int = 4, num_kv_heads: int = 4, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    # As models make them: a transposed view of (1, T, heads, dim).
    return tuple(
        torch.randn(1, total, heads, dim, generator=generator).transpose(1, 2)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )  # type: ignore[return-value]


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, causal: bool) -> Tensor:
    """Softmax attention spelled out, with one mask for all texts; (1, T, heads, dim)."""
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    distance = place[:, None] - place[None, :]
    allowed = text[:, None] == text[None, :]
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() < window
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3, 9, 50])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_attention_is_softmax_attention_within_each_text(
    num_kv_heads: int, window: int | None, causal: bool
) -> None:
    states = make_states(num_kv_heads=num_kv_heads)
    out, weights = packed_attention(
        Layer(causal), *states, None, scaling=0.3, sliding_window=window, packed=make_packed()
    )
    torch.testing.assert_close(out, by_hand(*states, 0.3, window, causal))
    assert weights is None


@pytest.mark.parametrize(("of_layer", "of_call", "causal"), [(True, False, False), (False, True, True)])
def test_is_causal_of_the_call_wins_over_that_of_the_layer(of_layer: bool, of_call: bool, causal: bool) -> None:
    states = make_states()
    out, _ = packed_attention(Layer(of_layer), *states, None, scaling=0.3, is_causal=of_call, packed=make_packed())
    torch.testing.assert_close(out, by_hand(*states, 0.3, None, causal))


def test_calls_are_counted() -> None:
    packed = make_packed()
    for _ in range(3):
        packed_attention(Layer(False), *make_states(), None, packed=packed)
    assert packed.num_calls == 3


def test_a_window_mask_is_built_once_a_forward_and_only_for_texts_longer_than_the_window() -> None:
    packed = make_packed()
    for _ in range(3):
        packed_attention(Layer(False), *make_states(), None, sliding_window=5, packed=packed)
    assert list(packed._masks) == [(9, 5, False)]


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_is_not_computed_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        packed_attention(Layer(False), *make_states(), None, packed=make_packed(), **{name: 1.0})  # type: ignore[arg-type]


def test_a_forward_that_drops_the_layout_or_brings_a_mask_is_refused() -> None:
    with pytest.raises(ModelError, match="does not hand"):
        packed_attention(Layer(False), *make_states(), None)
    with pytest.raises(ModelError, match="mask"):
        packed_attention(Layer(False), *make_states(), torch.ones(1), packed=make_packed())


class FakeKernel:
    """Stands in for a CUDA kernel: remembers its arguments, answers with the values."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def torch_2_11(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        self.arguments = {"cu_seq_q": cu_seq_q, "max_q": max_q, "scale": scale, "window_size": window_size}
        return query

    def torch_2_13(self, *args: Any, enable_gqa: bool = False, num_splits: int | None = None, **kwargs: Any) -> Tensor:
        out = self.torch_2_11(*args, **kwargs)
        self.arguments |= {"enable_gqa": enable_gqa, "num_splits": num_splits}
        return out

    def flash_attn(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.arguments = kwargs
        return query


def call_with(monkeypatch: pytest.MonkeyPatch, kernel: attention.VarlenCall, kind: str, **kwargs: Any) -> Tensor:
    monkeypatch.setattr(attention, "_varlen_call", lambda asked: {kind: kernel}[asked])
    states = make_states(num_kv_heads=kwargs.pop("num_kv_heads", 4))
    out, _ = packed_attention(Layer(False), *states, None, packed=make_packed(kind), **kwargs)
    torch.testing.assert_close(out, states[0].transpose(1, 2))
    return out


def test_torch_varlen_gets_flat_states_and_a_window_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKernel()
    call_with(monkeypatch, attention.torch_varlen(fake.torch_2_13), "torch-varlen", scaling=0.5)
    assert fake.arguments["cu_seq_q"].tolist() == [0, 9, 18, 23, 24, 25, 26]
    fake.arguments.pop("cu_seq_q")
    assert fake.arguments == {
        "max_q": 9,
        "scale": 0.5,
        "window_size": (-1, -1),
        "enable_gqa": False,
        "num_splits": 1,
    }


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [(None, False, (-1, -1)), (None, True, (-1, 0)), (4, False, (3, 3)), (4, True, (3, 0))],
)
def test_windows_are_given_as_flash_attention_counts_them(
    monkeypatch: pytest.MonkeyPatch, window: int | None, causal: bool, expected: tuple[int, int]
) -> None:
    fake = FakeKernel()
    kernel = attention.torch_varlen(fake.torch_2_11)
    call_with(monkeypatch, kernel, "torch-varlen", sliding_window=window, is_causal=causal)
    assert fake.arguments["window_size"] == expected
    assert isinstance(fake.arguments["window_size"], tuple)


def test_grouped_queries_are_announced_where_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKernel()
    call_with(monkeypatch, attention.torch_varlen(fake.torch_2_13), "torch-varlen", num_kv_heads=2)
    assert fake.arguments["enable_gqa"] is True


def test_an_older_torch_is_not_given_arguments_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKernel()
    call_with(monkeypatch, attention.torch_varlen(fake.torch_2_11), "torch-varlen", num_kv_heads=2)
    assert "num_splits" not in fake.arguments


def test_torch_here_has_the_arguments_that_are_passed() -> None:
    from torch.nn.attention.varlen import varlen_attn

    attention.torch_varlen(varlen_attn)


def test_flash_attn_is_told_causal_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKernel()
    kernel = attention.flash_attn_varlen(fake.flash_attn)
    call_with(monkeypatch, kernel, "flash-attn", scaling=0.5, is_causal=True)
    assert fake.arguments == {"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1)}


def test_a_missing_flash_attn_names_the_install_command() -> None:
    with pytest.raises(ModelError, match="pip install"):
        attention._varlen_call("flash-attn")


def test_the_best_kinds_for_the_machine_are_tried_in_order() -> None:
    assert choose_kinds("auto", "cpu", False, None) == ("grouped",)
    assert choose_kinds("auto", "cuda", True, (9, 0)) == ("torch-varlen", "grouped")
    assert choose_kinds("auto", "cuda", False, (9, 0)) == ("grouped",)
    assert choose_kinds("auto", "cuda", True, (7, 5)) == ("grouped",)
    assert choose_kinds("padded", "cuda", True, (9, 0)) == ()
    assert choose_kinds("flash-attn", "cuda", True, (8, 0)) == ("flash-attn",)


@pytest.mark.parametrize("kind", ["torch-varlen", "flash-attn"])
def test_a_kernel_that_cannot_run_here_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="needs a CUDA device"):
        choose_kinds(kind, "cpu", False, None)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown"):
        choose_kinds("fast", "cpu", False, None)


def test_the_registered_name_avoids_what_transformers_reads_into_names() -> None:
    from transformers import AttentionInterface

    attention.register()
    assert AttentionInterface()[attention.NAME] is packed_attention
    assert "flash" not in attention.NAME
    assert "/" not in attention.NAME
