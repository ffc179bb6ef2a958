"""Attention over packed texts: the one function that makes a padding-free forward correct.

A packed forward is a single sequence ``[1, T]`` in which many texts lie back to back. Every layer but attention treats
tokens one by one and needs no change; attention must not look across the border of a text. `packed_attention` is
registered with transformers under `NAME`, and computes it in one of three ways (`KINDS`):

- ``grouped``: each run of texts of equal length is one dense SDPA call without padding. Any device, any dtype.
- ``torch-varlen``: FlashAttention inside torch, one call for the whole batch. CUDA, half precision, sm80 or newer.
- ``flash-attn``: the same from the flash-attn package, when it is installed.

The layout of a batch travels to it as the keyword ``packed`` (a `Packed`), which transformers hands down untouched; no
state is kept between calls. It does not know padding: an architecture that cannot take it is run padded by the encoder,
which also proves at load that the function was really used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.errors import ModelError

# transformers treats a name with "flash" as its own FlashAttention path and one with "/" as a kernel to download.
NAME = "embed_packed"
KINDS = ("torch-varlen", "flash-attn", "grouped")


@dataclass
class Packed:
    """Where the texts of one packed forward lie, and how its attention is computed.

    Attributes:
        kind: one of `KINDS`.
        runs: ``(num_texts, length)`` of each run of neighbours of equal length, in order; they cover all T tokens.
        cu_seqlens: (n + 1,) int32 on the device.
        max_seqlen: longest text.
        num_calls: how often attention was computed with it; must end up as the number of layers.
    """

    kind: str
    runs: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor
    max_seqlen: int
    num_calls: int = 0
    _masks: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)

    def window_mask(self, length: int, window: int, causal: bool, device: torch.device) -> Tensor:
        """(length, length) bool: True where |i - j| < window (and j <= i when causal). Built once a forward."""
        key = (length, window, causal)
        if key not in self._masks:
            position = torch.arange(length, device=device)
            distance = position[:, None] - position[None, :]
            self._masks[key] = (distance.abs() < window) & (distance >= 0 if causal else torch.ones_like(distance) > 0)
        return self._masks[key]


def register(*, compiled: bool = False) -> None:
    """Make `NAME` known to transformers.

    Args:
        compiled: the model is compiled around it: torch.compile then leaves it alone.

    Only the attention function is registered, no mask function: for a name without one transformers hands on the
    caller's mask, here None, and builds no mask tensor.
    """
    from transformers import AttentionInterface

    function = torch.compiler.disable(packed_attention) if compiled else packed_attention  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, function)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The transformers attention interface for packed texts.

    Args:
        module: the layer's attention module; its ``is_causal`` holds unless the call says otherwise.
        query: (1, num_heads, T, head_dim).
        key, value: (1, num_kv_heads, T, head_dim); fewer heads than `query` for grouped-query attention.
        sliding_window: w lets a token see at most w - 1 tokens to each side (transformers' convention everywhere).
        packed: the batch's layout.

    Returns:
        (1, T, num_heads, head_dim), and None in place of the attention weights.

    Raises:
        ModelError: the model asks for something that packed attention does not compute.
    """
    if packed is None:
        raise ModelError("the model does not hand the packed layout on to its attention")
    if attention_mask is not None:
        raise ModelError("the model builds its own attention mask")
    for name, asked in (("softcap", softcap), *((n, kwargs.get(n)) for n in ("s_aux", "position_bias"))):
        if asked is not None:
            raise ModelError(f"the model's attention uses {name}, which packed attention does not compute")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    packed.num_calls += 1
    if packed.kind == "grouped":
        return _grouped(query, key, value, packed, scaling, sliding_window, causal), None
    # (1, heads, T, dim) -> (T, heads, dim), the layout of the varlen kernels.
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = _varlen_call(packed.kind)(q, k, v, packed, scaling, _flash_window(sliding_window, causal))
    return out.unsqueeze(0), None


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    scaling: float | None,
    window: int | None,
    causal: bool,
) -> Tensor:
    """One dense SDPA call a run of equal lengths; (1, T, num_heads, head_dim)."""
    _, num_heads, num_tokens, _ = query.shape
    out = query.new_empty((1, num_tokens, num_heads, value.shape[-1]))
    start = 0
    for num_texts, length in packed.runs:
        stop = start + num_texts * length
        # Splitting a dimension is a view whatever the strides: (1, heads, T, dim) -> (texts, heads, length, dim).
        q, k, v = (
            torch.unflatten(states[0, :, start:stop], 1, (num_texts, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        banded = window is not None and length > window
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=packed.window_mask(length, window or 0, causal, query.device) if banded else None,
            is_causal=causal and not banded and length > 1,
            scale=scaling,
            enable_gqa=k.shape[1] != num_heads,
        )
        torch.unflatten(out[0, start:stop], 0, (num_texts, length)).copy_(attended.transpose(1, 2))
        start = stop
    assert start == num_tokens, "runs must cover all tokens"
    return out


def _flash_window(window: int | None, causal: bool) -> tuple[int, int]:
    """FlashAttention's (left, right) window; -1 is unlimited. Always a tuple: torch compares it with ``==``."""
    left = -1 if window is None else window - 1
    return (left, 0 if causal else left)


VarlenCall = Callable[[Tensor, Tensor, Tensor, Packed, float | None, tuple[int, int]], Tensor]


@cache
def _varlen_call(kind: str) -> VarlenCall:
    """The kernel behind `kind`, under one signature.

    Raises:
        ModelError: it is not there.
    """
    if kind == "torch-varlen":
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise ModelError(
                f"torch {torch.__version__} has no torch.nn.attention.varlen; install torch>=2.11"
            ) from error
        return torch_varlen(varlen_attn)
    assert kind == "flash-attn", kind
    try:
        # Not find_spec("flash_attn"): flash-attn-4 owns a namespace of that name without this function.
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ModelError("flash-attn is not installed: pip install 'embed-corpus[flash-attn]'") from error
    return flash_attn_varlen(flash_attn_varlen_func)


def torch_varlen(varlen_attn: Callable[..., Any]) -> VarlenCall:
    """Call torch's varlen kernel; arguments that only some torch versions have are passed where they exist."""
    parameters = inspect.signature(varlen_attn).parameters
    extra: dict[str, Any] = {}
    if "num_splits" in parameters:
        # 1: a text's vector does not depend on the lengths of its neighbours, and newer torch keeps to FlashAttention
        # instead of a cuDNN graph that is rebuilt for every new shape.
        extra["num_splits"] = 1
    has_gqa = "enable_gqa" in parameters

    def call(
        query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: tuple[int, int]
    ) -> Tensor:
        gqa = {"enable_gqa": True} if has_gqa and query.shape[1] != key.shape[1] else {}
        cu, longest = packed.cu_seqlens, packed.max_seqlen
        out: Tensor = varlen_attn(
            query, key, value, cu, cu, longest, longest, scale=scaling, window_size=window, **gqa, **extra
        )
        return out

    return call


def flash_attn_varlen(flash_attn_varlen_func: Callable[..., Tensor]) -> VarlenCall:
    """Call flash-attn 2; it takes fewer key heads as they are."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: tuple[int, int]
    ) -> Tensor:
        cu, longest = packed.cu_seqlens, packed.max_seqlen
        causal = window[1] == 0
        sides = (window[0], -1) if causal and window[0] == -1 else window
        return flash_attn_varlen_func(
            query, key, value, cu, cu, longest, longest, softmax_scale=scaling, causal=causal, window_size=sides
        )

    return call


def choose_kinds(asked: str, device_type: str, half: bool, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The packed kinds to try, best first, for what the user asked and the machine has.

    Args:
        asked: ``auto``, ``padded`` or one of `KINDS`.
        device_type: ``cpu`` or ``cuda``.
        half: computing in float16 or bfloat16.
        capability: CUDA compute capability; None on CPU.

    Raises:
        ModelError: the asked kind cannot run here.
    """
    if asked == "padded":
        return ()
    has_kernels = device_type == "cuda" and half and capability is not None and capability >= (8, 0)
    if asked == "auto":
        return ("torch-varlen", "grouped") if has_kernels else ("grouped",)
    if asked not in KINDS:
        raise ModelError(f"attention {asked!r} is unknown, expected auto, padded, {', '.join(KINDS)}")
    if asked != "grouped" and not has_kernels:
        raise ModelError(
            f"attention {asked!r} needs a CUDA device of compute capability 8.0 or newer and float16 or bfloat16, "
            f"found {device_type} {capability or ''} {'half' if half else 'float32'}; use --attention auto".replace(
                "  ", " "
            )
        )
    return (asked,)
