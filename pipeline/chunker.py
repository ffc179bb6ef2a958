"""Windows of rows into windows of chunks: a text above the length limit becomes several overlapping pieces of itself.

A chunk is a span of the text's characters, cut between words, that fits the limit whole: special tokens, prompt and all
its own tokens, none dropped. It is embedded as the text it is, so its vector is what sentence-transformers gives for
``text[start:end]``. Every token of the text is in a chunk; what may lie between two is white space. Neighbours share at
most ``overlap`` tokens.

A text that fits, and a row without text, is one chunk. Each output row says where it came from: ``row`` in the shard,
``chunk`` number from 0, ``start`` and ``end`` in characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import tokenizers
from numpy.typing import NDArray

from pipeline.errors import ModelError
from pipeline.records import CHUNK_COLUMNS, Window
from pipeline.tokenizer import Tokenizer, TokenizerSpec

DEFAULT_OVERLAP_SHARE = 8  # an eighth of the room, when no overlap is given
# Taken off the room when the tokens of a piece on its own turn out more than they were inside the text.
SHRINK_TOKENS = 4


@dataclass(frozen=True)
class Span:
    """Characters ``text[start:end]``."""

    start: int
    end: int


class Chunker:
    """Cuts texts.

    Args:
        spec: the tokenizer, its limit and the prompt.
        overlap: tokens that neighbours share; None for an eighth of the room.

    Raises:
        ModelError: there is no limit to cut at, or the overlap leaves no progress.
    """

    def __init__(self, spec: TokenizerSpec, overlap: int | None = None) -> None:
        if spec.max_length is None:
            raise ModelError("--long-texts chunk: the model has no length limit; give --max-length")
        self._checker = Tokenizer(spec)
        self._limit = spec.max_length
        # Special tokens and prompt, as they are around an empty text.
        self._room = spec.max_length - int(self._checker.encode([""]).lengths[0])
        self._overlap = self._room // DEFAULT_OVERLAP_SHARE if overlap is None else overlap
        if not 0 <= self._overlap < self._room:
            raise ModelError(
                f"--chunk-overlap {self._overlap}: a chunk has room for {self._room} tokens of its own; give fewer"
            )
        self._tokenizer = tokenizers.Tokenizer.from_str(spec.json)
        self._tokenizer.encode_special_tokens = spec.split_special_tokens

    def expand(self, window: Window, spans: list[list[Span]] | None = None) -> Window:
        """The window with one entry a chunk; its table gains ``CHUNK_COLUMNS``. ``spans`` where they are known."""
        spans = self.cut(window.texts) if spans is None else spans
        counts = np.fromiter((len(of_text) for of_text in spans), np.int64, len(spans))
        origin = np.repeat(np.arange(len(spans)), counts)  # which entry of the window each chunk is from
        first = np.cumsum(counts) - counts
        number = np.arange(len(origin)) - first[origin]
        flat = [span for of_text in spans for span in of_text]
        texts = [
            None if text is None else text[flat[at].start : flat[at].end]
            for at, text in enumerate(window.texts[entry] for entry in origin)
        ]
        table = window.table.take(pa.array(origin))
        columns = {
            "row": pa.array(window.rows[origin], pa.int64()),
            "chunk": pa.array(number, pa.int32()),
            "start": pa.array([span.start for span in flat], pa.int64()),
            "end": pa.array([span.end for span in flat], pa.int64()),
        }
        for name, column in columns.items():
            table = table.append_column(name, column)
        rejected = {int(first[entry]): reason for entry, reason in window.rejected.items()}
        return Window(window.first_row, table, texts, rejected, window.rows[origin])

    def cut(self, texts: Sequence[str | None]) -> list[list[Span]]:
        """The chunks of each text, in order; one for a text that fits, and for none at all."""
        spans = [[Span(0, len(text or ""))] for text in texts]
        given = [at for at, text in enumerate(texts) if text]
        for which in np.flatnonzero(self._too_long([texts[at] or "" for at in given])):
            spans[given[which]] = self._cut_one(texts[given[which]] or "")
        return spans

    def _too_long(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        return self._checker.encode(texts).dropped > 0

    def _cut_one(self, text: str) -> list[Span]:
        """A piece on its own may have a few tokens more than inside its text: then all are cut again, shorter."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        for room in range(self._room, 0, -SHRINK_TOKENS):
            spans = _spans(encoding, room, min(self._overlap, room - 1))
            if not self._too_long([text[span.start : span.end] for span in spans]).any():
                return spans
        raise ModelError("a text cannot be cut into pieces within the length limit; give a larger --max-length")


def _spans(encoding: tokenizers.Encoding, room: int, overlap: int) -> list[Span]:
    """Pieces of at most ``room`` tokens, from a word's beginning to a word's end, or inside a word that is longer.

    Each piece but the first begins at most ``overlap`` tokens before its predecessor's end, and after its beginning.
    """
    offsets, words = encoding.offsets, encoding.word_ids
    num_tokens = len(offsets)
    borders = np.array([n for n in range(num_tokens) if n == 0 or words[n] is None or words[n] != words[n - 1]])
    borders = np.append(borders, num_tokens)
    spans: list[Span] = []
    start = stop = 0
    while stop < num_tokens:
        # Every piece must go beyond the one before it; where a long word leaves no room for that, without overlap.
        further = _last(borders, stop + 1, start + room)
        if not further and start < stop:
            start = stop
            further = _last(borders, stop + 1, start + room)
        stop = further or min(start + room, num_tokens)
        spans.append(Span(offsets[start][0], offsets[stop - 1][1]))
        following = int(borders[np.searchsorted(borders, max(stop - overlap, start + 1))])
        start = min(following, stop)
    return spans


def _last(borders: NDArray[np.int64], low: int, high: int) -> int:
    """The largest border from ``low`` to ``high``, 0 if there is none."""
    at = int(np.searchsorted(borders, high, side="right")) - 1
    return int(borders[at]) if at >= 0 and borders[at] >= low else 0


def with_chunk_columns(schema: pa.Schema) -> pa.Schema:
    """The columns of an output with those of ``CHUNK_COLUMNS`` behind them."""
    kinds = (pa.int64(), pa.int32(), pa.int64(), pa.int64())
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in zip(CHUNK_COLUMNS, kinds, strict=True))])
