"""Turns token states into vectors: sentence-transformers' pooling and the modules around it, on packed texts.

`Chain` is the folder's modules after the transformer, `Finish` the user's wishes on top of them, `pool` the pooling.

Everything is float32 whatever the model computes in, so a half-precision run loses nothing here. Each mode gives what
``sentence_transformers``' own ``Pooling`` gives for the same text alone, also where it is odd: a text all of whose
tokens belong to an excluded prompt gets zeros (mean, weightedmean, lasttoken), its first token (cls) or -inf (max).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.records import EncoderSettings


@dataclass(frozen=True)
class Segments:
    """Where the texts lie in flat token states; all on the device, int64.

    Attributes:
        starts, lengths: (n,) first token and number of tokens of each text; no text is empty.
        positions: (T,) place of each token in its text, from 0.
    """

    starts: Tensor
    lengths: Tensor
    positions: Tensor


def pool(states: Tensor, segments: Segments, modes: tuple[str, ...], prompt_length: int = 0) -> Tensor:
    """One vector a text.

    Args:
        states: (T, dim) float32.
        segments: the texts, covering all T tokens.
        modes: sentence-transformers' names; more than one are concatenated.
        prompt_length: leading tokens of every text to leave out; 0 to keep all.

    Returns:
        (n, len(modes) * dim) float32.
    """
    return torch.cat([_pool(states, segments, mode, prompt_length) for mode in modes], dim=-1)


def _pool(states: Tensor, segments: Segments, mode: str, prompt_length: int) -> Tensor:
    has_content = segments.lengths > prompt_length
    if mode == "cls":
        # Not torch.where, which copies two plain numbers to the device: that waits for it, and no graph records it.
        return states[segments.starts + has_content * prompt_length]
    if mode == "lasttoken":
        last = states[segments.starts + segments.lengths - 1]
        return last * has_content.unsqueeze(1) if prompt_length else last
    if mode == "max":
        if prompt_length:
            states = states.masked_fill((segments.positions < prompt_length).unsqueeze(1), float("-inf"))
        return _reduce(states, "max", segments)
    if mode == "weightedmean":
        weights = (segments.positions + 1).to(states.dtype)
    else:
        weights = torch.ones_like(segments.positions, dtype=states.dtype)
    if prompt_length:
        weights = weights * (segments.positions >= prompt_length)
    if prompt_length or mode == "weightedmean":
        states = states * weights.unsqueeze(1)
    total = _reduce(weights.unsqueeze(1), "sum", segments).clamp(min=1e-9)
    if mode == "mean_sqrt_len_tokens":
        total = total.sqrt()
    return _reduce(states, "sum", segments) / total


def _reduce(values: Tensor, how: str, segments: Segments) -> Tensor:
    # unsafe: the lengths are ours; checking them would wait for the device.
    return torch.segment_reduce(values, how, lengths=segments.lengths, axis=0, unsafe=True)


@dataclass(frozen=True)
class Chain:
    """What comes after the transformer, in float32 whatever the transformer computes in.

    Attributes:
        before_pooling: modules on token states.
        modes, prompt_length: the pooling.
        all_after_pooling: modules on vectors, as the folder has them.
        after_pooling: the same, as the settings want them.
    """

    before_pooling: tuple[nn.Module, ...]
    modes: tuple[str, ...]
    prompt_length: int
    all_after_pooling: tuple[nn.Module, ...]
    after_pooling: tuple[nn.Module, ...]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], prompt_length: int, normalize: bool | None) -> Chain:
        # Copies: the originals must stay in the model's dtype to give the reference vectors.
        chain: list[Any] = [copy.deepcopy(module).float() for module in list(modules)[1:]]
        names = [type(module).__name__ for module in chain]
        at = names.index("Pooling")
        modes = chain[at].pooling_mode
        after = tuple(chain[at + 1 :])
        return cls(
            before_pooling=tuple(chain[:at]),
            modes=(modes,) if isinstance(modes, str) else tuple(modes),
            prompt_length=prompt_length,
            all_after_pooling=after,
            after_pooling=tuple(m for m in after if normalize is not False or type(m).__name__ != "Normalize"),
        )

    @property
    def normalizes(self) -> bool:
        """Whether the chain's vectors are of unit length; a Dense behind a Normalize undoes it."""
        names = [type(module).__name__ for module in self.after_pooling]
        return next((name == "Normalize" for name in reversed(names) if name != "Dropout"), False)

    def vectors(self, states: Tensor, segments: Segments, after_pooling: tuple[nn.Module, ...]) -> Tensor:
        """(T, hidden) states of the transformer to (n, dim) float32 vectors."""
        features: dict[str, Tensor] = {"token_embeddings": states.float()}
        for module in self.before_pooling:
            features = module(features)
        features["sentence_embedding"] = pool(features["token_embeddings"], segments, self.modes, self.prompt_length)
        for module in after_pooling:
            features = module(features)
        return features["sentence_embedding"]


@dataclass(frozen=True)
class Finish:
    """The user's wishes on top of the folder: how many dimensions to keep, and whether to normalise after that."""

    dimensions: int | None
    normalize: bool

    @classmethod
    def of(cls, settings: EncoderSettings, chain: Chain, truncate_dim: int | None) -> Finish:
        """A cut that the user asks for is renormalised; one that the folder asks for is not: so does ST's encode."""
        wanted = settings.normalize is True and not chain.normalizes
        if settings.dimensions is None:
            return cls(truncate_dim, settings.normalize is True if truncate_dim else wanted)
        return cls(settings.dimensions, settings.normalize is True or chain.normalizes)

    def __call__(self, vectors: Tensor) -> Tensor:
        vectors = vectors[:, : self.dimensions]
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
