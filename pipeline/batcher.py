"""Turns token lengths into batches: which texts are computed together, and the flat arrays they are computed from.

Texts are taken longest first. Neighbours in that order have equal or nearly equal lengths, so packed attention gets
long runs of one length and a padded forward wastes little; and the batch that needs the most memory is the first one,
so a budget that is too large shows at once. Every text is in exactly one batch, and the plan depends on nothing but
the lengths and the budget, so a resumed run computes the same batches.

It does not tokenize, and it never splits a text: one that is longer than the budget is a batch of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Batch, Tokens


def plan_batches(lengths: NDArray[np.int32], max_batch_tokens: int, *, padded: bool = False) -> list[NDArray[np.int64]]:
    """Group texts so that no batch computes more than `max_batch_tokens` tokens.

    A batch costs the sum of its lengths, or `num_texts * longest` when `padded`. Example with a budget of 8 and lengths
    ``[3, 5, 1, 3]``: packed gives ``[1, 0], [3, 2]`` (8 and 4 tokens), padded gives ``[1], [0, 3], [2]``.

    Args:
        lengths: (n,) tokens of each text.
        max_batch_tokens: budget of one batch, at least 1.
        padded: count the padding too.

    Returns:
        Indices into `lengths`, (num_texts,) each; longest first, ties in input order.
    """
    if max_batch_tokens < 1:
        raise ValueError(f"max_batch_tokens is {max_batch_tokens}, expected at least 1")
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    ordered = lengths[order].astype(np.int64)
    ends = np.cumsum(ordered)
    batches = []
    start = 0
    while start < len(order):
        if padded:
            # Longest first: the first text of a batch sets its width.
            stop = start + max_batch_tokens // max(1, int(ordered[start]))
        else:
            used = ends[start] - ordered[start]
            stop = int(np.searchsorted(ends, used + max_batch_tokens, side="right"))
        stop = min(max(stop, start + 1), len(order))
        batches.append(order[start:stop])
        start = stop
    return batches


def pack(tokens: Tokens, indices: NDArray[np.int64]) -> Batch:
    """Lay the chosen texts back to back, in the order of `indices`.

    Args:
        tokens: token ids of all texts.
        indices: (num_texts,) which of them.
    """
    lengths = tokens.lengths[indices]
    cu_seqlens = np.zeros(len(indices) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    # Source position of each target position: its text's shift, plus where it stands in the batch.
    shift = np.repeat(tokens.starts[indices] - cu_seqlens[:-1], lengths)
    return Batch(
        input_ids=tokens.input_ids[shift + np.arange(cu_seqlens[-1])],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max(initial=0)),
        texts=np.asarray(indices, np.int64),
    )
