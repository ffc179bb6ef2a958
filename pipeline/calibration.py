"""A sample of texts into their token lengths and the measured seconds of some of their batches; runs in a worker.

The batches are cut from windows as a run cuts them: the sample is laid out in windows of as many rows as a run's, each
is sorted by length and planned with the run's budget. A few of them, spread evenly from the longest texts to the
shortest, are computed and timed. `windows` and `cost_terms` serve the plan too, so that it predicts what is measured.

Nothing is written, and vectors are thrown away.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline import batcher
from pipeline.chunker import Chunker
from pipeline.records import Batch
from pipeline.reuse import token_hashes
from pipeline.tokenizer import Tokenizer

MAX_SECONDS = 10.0
MAX_BATCHES = 48  # more do not narrow what the scatter of a busy machine leaves open
MIN_BATCHES = 2  # beside the first, which warms up; however long they take
SEED = 20_240_229


class Encodes(Protocol):
    """What is needed of an encoder here."""

    @property
    def padded(self) -> bool: ...
    def encode(self, batch: Batch) -> NDArray[np.float32]: ...


def calibrate(
    encoder: Encodes,
    tokenizer: Tokenizer,
    chunker: Chunker | None,
    texts: list[str | None],
    window_rows: int,
    max_batch_tokens: int,
) -> dict[str, Any]:
    """Tokenize a sample and time some of its batches.

    Args:
        encoder, tokenizer, chunker: those of the run; no chunker where long texts are cut off.
        texts: n rows, None for one without text.
        window_rows: rows of a run's window.
        max_batch_tokens: budget of a batch.

    Returns:
        ``pieces`` (n,) vectors of each row, ``lengths`` and ``dropped`` of all pieces in order, ``tokenize_s`` of the
        whole sample, ``padded``, and ``timed``: (tokens, squares, 1, seconds) of each batch, see `cost_terms`.
    """
    start = time.perf_counter()
    given = [text for text in texts if text is not None]
    counts = np.ones(len(given), np.int64)
    if chunker is not None:
        spans = chunker.cut(given)
        counts = np.array([len(of_text) for of_text in spans], np.int64)
        given = [text[span.start : span.end] for text, cut in zip(given, spans, strict=True) for span in cut]
    tokens = tokenizer.encode(given)
    token_hashes(tokens)  # a run makes them too
    tokenize_s = time.perf_counter() - start

    has_tokens = tokens.lengths > 0
    owner = np.repeat(np.flatnonzero([text is not None for text in texts]), counts)[has_tokens]
    pieces = np.bincount(owner, minlength=len(texts))
    kept = np.flatnonzero(has_tokens)
    batches = [
        kept[window[chosen]]
        for window in windows(pieces, window_rows)
        for chosen in batcher.plan_batches(tokens.lengths[kept[window]], max_batch_tokens, padded=encoder.padded)
    ]
    batches.sort(key=lambda batch: -int(tokens.lengths[batch[0]]))
    timed: list[list[float]] = []
    began = time.perf_counter()
    for warm, number in [(False, 0), *((True, number) for number in spread(len(batches)))] if batches else []:
        batch = batcher.pack(tokens, batches[number])
        before = time.perf_counter()
        encoder.encode(batch)
        if warm:
            timed.append([*cost_terms(batch.lengths, padded=encoder.padded), time.perf_counter() - before])
        spent = time.perf_counter() - began
        if len(timed) >= MAX_BATCHES or (len(timed) >= MIN_BATCHES and spent > MAX_SECONDS):
            break
    return {
        "pieces": pieces.tolist(),
        "lengths": tokens.lengths[kept].tolist(),
        "dropped": tokens.dropped[kept].tolist(),
        "tokenize_s": tokenize_s,
        "padded": encoder.padded,
        "timed": timed,
    }


def windows(pieces: NDArray[np.int64], window_rows: int) -> list[NDArray[np.int64]]:
    """The sample laid out in windows of ``window_rows`` rows, in random order.

    A window larger than the sample has each row several times; smaller ones share it out, a rest is left over.

    Args:
        pieces: (num_rows,) how many pieces each row of the sample has.
        window_rows: at least 1.

    Returns:
        For each window the numbers of its pieces, counted over the whole sample.
    """
    order = np.random.default_rng(SEED).permutation(len(pieces))
    if window_rows >= len(order):
        chosen = [np.resize(order, window_rows)] if len(order) else []
    else:
        chosen = list(order[: len(order) // window_rows * window_rows].reshape(-1, window_rows))
    ends = np.cumsum(pieces)
    return [_pieces_of(rows, pieces, ends) for rows in chosen]


def _pieces_of(rows: NDArray[np.int64], pieces: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = pieces[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: NDArray[np.int64] = np.repeat(ends[rows] - counts, counts) + within
    return numbers


def spread(count: int) -> list[int]:
    """0 … count - 1 in an order whose beginnings are spread evenly: 0, a half, a quarter, three quarters …"""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def cost_terms(lengths: NDArray[np.int32], *, padded: bool) -> tuple[float, float, float]:
    """What the seconds of a batch are linear in: tokens computed, pairs of tokens that attend, 1."""
    if not len(lengths):
        return 0.0, 0.0, 0.0
    computed = np.full(len(lengths), lengths.max(), np.float64) if padded else lengths.astype(np.float64)
    return float(computed.sum()), float((computed**2).sum()), 1.0
