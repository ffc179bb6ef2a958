"""Texts of a corpus drawn by a seed, from many row groups of all shards: what a plan knows of the texts.

Spots are spread evenly over all rows: each row is as likely to be hit as any other, wherever it stands. At each spot
some random rows of the row group that was hit are read. The mean of the spots' means is then an unbiased estimate of
the mean a row, and their scatter says how good it is, also where neighbouring rows are alike.

A corpus of few rows is read whole. Reading is bounded: where row groups are large, fewer spots are visited.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ShardError
from pipeline.reader import read_texts
from pipeline.records import Shard
from pipeline.shards import Columns, open_parquet, output_columns

MAX_TEXTS = 4_096
NUM_SPOTS = 64  # a power of two: halved where reading would take too long
MIN_SPOTS = 8
MAX_READ_BYTES = 1 << 30  # of text columns, decoded; a second or two from a disk
MAX_TEXT_BYTES = 32 << 20  # of all texts that are kept
SEED = 20_240_229


@dataclass
class Sample:
    """Texts and where they come from.

    Attributes:
        texts: all of them, spot after spot; None for a row without text.
        spots: how many of them each spot has.
        every_row: nothing was drawn, all rows that can be read are here.
        damaged: (shard, reason) of those that could not be read where they were hit.
        carried_bytes: of the id and carried columns, a row, as they are compressed in the input.
    """

    texts: list[str | None] = field(default_factory=list)
    spots: list[int] = field(default_factory=list)
    every_row: bool = False
    damaged: list[tuple[Shard, str]] = field(default_factory=list)
    carried_bytes: float = 0.0

    @property
    def text_bytes(self) -> float:
        """Mean UTF-8 bytes a row."""
        return sum(len(text.encode("utf-8", "replace")) for text in self.texts if text) / max(1, len(self.texts))


@dataclass(frozen=True)
class _Groups:
    """Row groups of a shard: where each ends, and the size of its texts when decoded."""

    ends: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    carried_bytes: int


def draw_sample(shards: Sequence[Shard], columns: Columns, seed: int = SEED) -> Sample:
    """At most about ``MAX_TEXTS`` texts of all shards.

    Raises:
        ShardError: no spot could be read.
    """
    rng = np.random.default_rng(seed)
    ends = np.cumsum([shard.num_rows or 0 for shard in shards], dtype=np.int64)
    sample = Sample(every_row=bool(ends[-1] <= MAX_TEXTS))
    footers = _Footers(shards, columns)
    if sample.every_row:
        hits = [(at, group) for at in range(len(shards)) for group in range(len(footers[at].ends))]
        per_spot, max_bytes = MAX_TEXTS, MAX_READ_BYTES
    else:
        hits = _hits(ends, footers, rng)
        per_spot, max_bytes = MAX_TEXTS // NUM_SPOTS, MAX_TEXT_BYTES // len(hits)
    for (at, group), visits in sorted(collections.Counter(hits).items()):
        try:
            num_rows = int(np.diff(footers[at].ends, prepend=0)[group])
            drawn = [rng.permutation(num_rows)[:per_spot] for _ in range(visits)]
            wanted = np.unique(np.concatenate(drawn))
            texts = dict(zip(wanted.tolist(), read_texts(shards[at], columns, group, wanted), strict=True))
        except ShardError as error:
            sample.damaged.append((shards[at], str(error)))
            continue
        for rows in drawn:
            kept = _up_to(max_bytes, [texts[row] for row in rows.tolist()])
            if kept:
                sample.texts += kept
                sample.spots.append(len(kept))
    if not sample.texts and sample.damaged:
        raise ShardError(sample.damaged[0][1])
    visited = {at for at, _ in hits}
    carried = sum(footers[at].carried_bytes for at in visited)
    sample.carried_bytes = carried / max(1, sum(shards[at].num_rows or 0 for at in visited))
    return sample


def _hits(ends: NDArray[np.int64], footers: _Footers, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(shard, row group) of each spot; one spot in each equal part of all rows, or in one of two neighbouring parts."""
    rows = ((np.arange(NUM_SPOTS) + rng.random(NUM_SPOTS)) * ends[-1] / NUM_SPOTS).astype(np.int64)
    while True:
        hits = []
        for row in rows.tolist():
            at = int(np.searchsorted(ends, row, side="right"))
            in_shard = row - (int(ends[at - 1]) if at else 0)
            group = int(np.searchsorted(footers[at].ends, in_shard, side="right"))
            hits.append((at, min(group, len(footers[at].ends) - 1)))
        size = sum(int(footers[at].text_bytes[group]) for at, group in set(hits))
        if size <= MAX_READ_BYTES or len(rows) <= MIN_SPOTS:
            return hits
        pairs = rows.reshape(-1, 2)
        rows = pairs[np.arange(len(pairs)), rng.integers(0, 2, len(pairs))]


def _up_to(max_bytes: int, texts: list[str | None]) -> list[str | None]:
    """The first texts, until they are more than ``max_bytes`` characters; at least one."""
    sizes = np.cumsum([len(text or "") for text in texts])
    return texts[: int(np.searchsorted(sizes, max_bytes)) + 1]


class _Footers:
    """What the footers say of row groups, read when it is asked for."""

    def __init__(self, shards: Sequence[Shard], columns: Columns) -> None:
        self._shards, self._columns = shards, columns
        self._known: dict[int, _Groups] = {}

    def __getitem__(self, at: int) -> _Groups:
        if at not in self._known:
            self._known[at] = self._read(self._shards[at])
        return self._known[at]

    def _read(self, shard: Shard) -> _Groups:
        carried = output_columns(self._columns)
        with open_parquet(shard.path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            chunks = [[group.column(number) for number in range(group.num_columns)] for group in groups]
            return _Groups(
                np.cumsum([group.num_rows for group in groups], dtype=np.int64),
                np.array([sum(c.total_uncompressed_size for c in of if _is(c, [self._columns.text])) for of in chunks]),
                sum(c.total_compressed_size for of in chunks for c in of if _is(c, carried)),
            )


def _is(chunk: Any, names: Sequence[str]) -> bool:
    """Whether a column chunk belongs to one of the columns, which may be nested."""
    return any(chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in names)
