"""Rows of the index -> the texts they were made from, read from the input shards; never a text that may be another's.

A shard is read only while it is the file that was embedded: by size and modification time, or etag, as a run tells a
changed input. It is looked for where it was read, then under the same key below the inputs of the last run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import EmbedCorpusError, ShardError
from pipeline.ledger import same_input
from pipeline.reader import read_texts
from pipeline.records import Shard
from pipeline.rows import Positions, group_starts
from pipeline.shards import Columns, find_shards, open_parquet


class SourceTexts:
    """The text column of the input.

    Args:
        column: its name, or dotted path.
        shards: what the commit records say of each shard, by key.
        inputs: of the last run.
        output: what lies there is no input.
    """

    def __init__(self, column: str, shards: Mapping[str, dict[str, Any]], inputs: list[str], output: str) -> None:
        self._columns, self._shards = Columns(column, None), shards
        self._inputs, self._output = inputs, output

    def read(self, key: str, rows: Positions) -> list[str | None]:
        """The texts of (n,) input rows of a shard.

        Raises:
            ShardError: the shard is gone, has changed, or cannot be read.
        """
        shard = self._find(key)
        with open_parquet(shard.path) as file:
            starts = group_starts(file)
        wanted, place = np.unique(rows, return_inverse=True)
        groups = np.searchsorted(starts[1:], wanted, side="right")
        texts: list[str | None] = []
        for group in np.unique(groups):
            here = wanted[groups == group] - starts[group]
            texts += read_texts(shard, self._columns, int(group), here)
        if self._find(key) != shard:
            raise ShardError(f"{shard.path} changed while it was read")
        return [texts[at] for at in place]

    def _find(self, key: str) -> Shard:
        recorded = self._shards[key]
        found = _shard_at(recorded["path"])
        if found is None or not same_input(recorded, found):
            found = self._listed.get(key, found)
        if found is None:
            raise ShardError(f"{recorded['path']} is gone")
        if not same_input(recorded, found):
            raise ShardError(f"{found.path} has changed since it was embedded")
        return found

    @functools.cached_property
    def _listed(self) -> dict[str, Shard]:
        """The shards of the inputs; asked for only where one is not where it was."""
        found: dict[str, Shard] = {}
        for name in self._inputs:
            try:
                found |= {shard.key: shard for shard in find_shards([name], self._output)}
            except EmbedCorpusError:  # this one is gone, too
                continue
        return found


def _shard_at(path: str) -> Shard | None:
    try:
        shards = find_shards([path])
    except EmbedCorpusError:
        return None
    return shards[0] if len(shards) == 1 else None
