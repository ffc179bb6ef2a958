"""Attention over packed texts against float64 attention of each text alone: the cases, the reference, the limits.

Plain functions, used by the tests here and by ``measure.py``. The states are drawn so that attention is peaked: a key
too many or too few, a wrong scaling or a mixed-up head then changes some vector by a good part of its length, where
half precision changes it by a thousandth.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pipeline.attention import KINDS as PACKED_KINDS
from pipeline.attention import Packed, packed_attention
from pipeline.batcher import plan_batches

KINDS = (*PACKED_KINDS, "padded")
HALF = (torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 64, 96, 128, 256)
WINDOW = 65  # ModernBERT's: 64 tokens to each side, and the token itself
# Around the tiles of the kernels (64, 128), several equal ones, several of one token; 14,000 tokens.
LENGTHS = (4096, 2049, 2048, 1024, 1024, 1000, 513, 512, 257, 256, 129, 128, 127, 65, 64, 63, 33, 17, 9, 9, 2, 1, 1, 1)
SHORT_LENGTHS = (150, 129, 128, 66, 65, 64, 33, 9, 9, 2, 1, 1)
PADDED_TOKENS = 32_768  # of one padded call

# Largest |difference| of a token's output vector, relative to that vector's length. Rounding the weights and the output
# costs about 0.0004 (float16) or 0.003 (bfloat16); the worst of a million vectors has two to three times that.
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """One layer's attention over one batch; everything but the numbers' type and the way it is computed.

    Attributes:
        window: as transformers counts it: at most ``window - 1`` tokens to each side; None for no limit.
        lengths: of the texts, in their order in the batch.
        name: what is special about it; empty for a member of the grid.
    """

    head_dim: int
    num_heads: int = 4
    num_kv_heads: int = 4
    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = LENGTHS
    name: str = ""

    @property
    def scaling(self) -> float:
        """Not the usual 1 / sqrt(head_dim), so that one that is ignored shows."""
        return 1.5 / self.head_dim**0.5

    def __str__(self) -> str:
        parts = [f"dim{self.head_dim}", f"heads{self.num_heads}-{self.num_kv_heads}"]
        parts += ["causal"] * self.causal + [f"window{self.window}"] * (self.window is not None)
        return "-".join(parts + [self.name.replace(" ", "_")] * bool(self.name))


@dataclass(frozen=True)
class Difference:
    """How far an output is from the reference.

    Attributes:
        max_abs: of a single number.
        max_relative: of a token's vector in one head, relative to the reference's length; infinite for NaN.
        min_cosine: of such a vector.
    """

    max_abs: float
    max_relative: float
    min_cosine: float


def cases(lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = HEAD_DIMS) -> list[Case]:
    """Every head size with and without causal mask, window and grouped queries; then what lies outside that grid."""
    lengths = tuple(lengths)
    grid = itertools.product(head_dims, (False, True), (None, WINDOW), ((4, 4), (8, 2)))
    found = [Case(dim, *heads, causal, window, lengths) for dim, causal, window, heads in grid]
    shuffled = tuple(np.random.default_rng(0).permutation(lengths).tolist())
    few = max(lengths)
    found += [
        Case(8, lengths=lengths, name="smallest head"),
        Case(80, lengths=lengths, name="head between the kernels' sizes"),
        Case(64, 6, 1, lengths=lengths, name="one key head"),
        Case(64, window=1, lengths=lengths, name="window of one"),
        Case(64, lengths=shuffled, name="unsorted"),
        Case(64, causal=True, lengths=(few,), name="a single text"),
        Case(64, lengths=(1,), name="a single token"),
        Case(64, lengths=tuple(sorted((1 + i % 3 for i in range(few)), reverse=True)), name="many short texts"),
    ]
    return found


def make_states(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value as models make them: (1, heads, T, head_dim), transposed views of (1, T, heads, head_dim)."""
    generator = torch.Generator(device).manual_seed(case.head_dim)
    total = sum(case.lengths)
    query, key, value = (
        torch.randn(1, total, heads, case.head_dim, generator=generator, device=device).to(dtype).transpose(1, 2)
        for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    )
    return query, key, value


def allowed(length: int, case: Case, device: torch.device) -> Tensor:
    """(length, length) bool: which keys each query of one text sees."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    mask = distance >= 0 if case.causal else torch.ones_like(distance, dtype=torch.bool)
    return mask if case.window is None else mask & (distance.abs() < case.window)


def reference(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """(1, T, num_heads, head_dim) float64: each text alone, its mask spelled out, by plain matrix products.

    float64, so that float32 is measured by its own rounding and no matrix product is rounded to TF32.
    """
    repeat = case.num_heads // case.num_kv_heads
    wide = [query[0].double(), *(states[0].double().repeat_interleave(repeat, 0) for states in (key, value))]
    outputs = []
    with sdpa_kernel(SDPBackend.MATH):
        for start, length in _texts(case.lengths):
            q, k, v = (states[None, :, start : start + length] for states in wide)
            mask = allowed(length, case, query.device)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scaling)
            outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)[None]


def attend(kind: str, query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """(1, T, num_heads, head_dim) in the states' type, computed as `kind` does it."""
    layer = Layer(case)
    if kind == "padded":
        return _padded(layer, query, key, value, case)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=query.device)
    runs = tuple((len(list(run)), length) for length, run in groupby(case.lengths))
    packed = Packed(kind=kind, runs=runs, cu_seqlens=cu_seqlens, max_seqlen=max(case.lengths))
    out, _ = packed_attention(
        layer, query, key, value, None, scaling=case.scaling, sliding_window=case.window, packed=packed
    )
    return out


class Layer(nn.Module):
    """What transformers' attention functions read from a layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.is_causal = case.causal
        self.num_key_value_groups = case.num_heads // case.num_kv_heads


def _padded(layer: Layer, query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """What a padded forward runs: transformers' own SDPA, padding on the right, one mask for all."""
    from transformers import AttentionInterface

    total, device = query.shape[2], query.device
    lengths = np.array(case.lengths, np.int32)
    starts = np.cumsum(lengths) - lengths
    out = query.new_empty((1, total, case.num_heads, case.head_dim))
    for chosen in plan_batches(lengths, PADDED_TOKENS, padded=True):
        longest = int(lengths[chosen].max())
        # (texts, longest): which token stands in each slot; a slot behind the end of its text holds some other token.
        place = torch.arange(longest, device=device)[None, :]
        inside = place < torch.tensor(lengths[chosen], device=device)[:, None]
        token = (torch.tensor(starts[chosen], device=device)[:, None] + place).clamp(max=total - 1)
        # (heads, T, dim) -> (texts, heads, longest, dim)
        q, k, v = (states[0][:, token].transpose(0, 1) for states in (query, key, value))
        mask = inside[:, None, None, :] & allowed(longest, case, device)
        attended, _ = AttentionInterface()["sdpa"](layer, q, k, v, mask, scaling=case.scaling)
        out[0, token[inside]] = attended[inside]
    return out


def _texts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first token, number of tokens) of each text."""
    ends = itertools.accumulate(lengths)
    return ((end - length, length) for end, length in zip(ends, lengths, strict=True))


@lru_cache(maxsize=1)
def prepared(case: Case, dtype: torch.dtype, device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """States and reference; kept for the next kind, which needs the same."""
    states = make_states(case, dtype, device)
    return states, reference(*states, case)


def difference(out: Tensor, expected: Tensor) -> Difference:
    """Compare two (1, T, heads, head_dim)."""
    assert out.shape == expected.shape, (out.shape, expected.shape)
    out = out.double()
    if not bool(torch.isfinite(out).all()):
        return Difference(float("inf"), float("inf"), -1.0)
    gap = out - expected
    relative = gap.norm(dim=-1) / expected.norm(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(out, expected, dim=-1)
    return Difference(float(gap.abs().max()), float(relative.max()), float(cosine.min()))


def measure(kind: str, case: Case, dtype: torch.dtype, device: str) -> Difference:
    """The difference of one kind on one case."""
    states, expected = prepared(case, dtype, device)
    with torch.inference_mode():
        return difference(attend(kind, *states, case), expected)


def passes(found: Difference, dtype: torch.dtype) -> bool:
    """Within the limit of the type; a vector so near has a cosine of at least 1 - limit², which is asked for, too."""
    limit = LIMITS[dtype]
    return found.max_relative <= limit and found.min_cosine >= 1 - limit**2


def dtypes_of(kind: str) -> tuple[torch.dtype, ...]:
    """The kernels take half precision only."""
    return HALF if kind in ("torch-varlen", "flash-attn") else (torch.float32, *HALF)


def why_not(kind: str, device: str) -> str:
    """Why `kind` cannot run on this machine; empty where it can."""
    if kind in ("grouped", "padded"):
        return ""
    if not device.startswith("cuda"):
        return "needs a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if kind == "flash-attn":
        try:
            importlib.import_module("flash_attn").flash_attn_varlen_func  # noqa: B018 - flash-attn 4 lacks it
        except (ImportError, AttributeError):
            return "flash-attn is not installed"
    return ""


def as_row(kind: str, case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """One case measured, as plain values; a failure of whatever kind is kept as ``error``."""
    row: dict[str, Any] = {"kind": kind, "dtype": str(dtype).removeprefix("torch."), "head_dim": case.head_dim}
    try:
        found = measure(kind, case, dtype, device)
    except Exception as error:  # whatever a kernel does, the table must say it
        return {**row, "case": str(case), "ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        **row,
        "case": str(case),
        "ok": passes(found, dtype),
        "max_abs": found.max_abs,
        "max_relative": found.max_relative,
        "min_cosine": found.min_cosine,
        "error": "",
    }
