"""The plain values that pass from stage to stage. No stage imports another one; they all import this.

*row* is a position in a shard, *id* the user's key, *text* one distinct string to be embedded (the same text on two
rows of a window is one text). Arrays are numpy and never padded: a batch of n texts with T tokens in all is
``input_ids (T,)`` beside ``cu_seqlens (n + 1,)``.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PARTS = "parts"
"""Folder of the output where the parts of large shards lie until they are put together."""

CHUNK_COLUMNS = ("row", "chunk", "start", "end")
"""What the output has beside the id where a long text has several rows: the input row, and which piece of its text."""


@dataclass(frozen=True)
class Part:
    """Consecutive row groups of a large shard: a unit of work of its own.

    Attributes:
        number: from 0.
        first_row_group, end_row_group: the last one excluded.
        first_row, num_rows: in the shard.
    """

    number: int
    first_row_group: int
    end_row_group: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Shard:
    """One input file, or a part of one, and what identifies its content.

    Attributes:
        key: path relative to the input root, without ``.parquet``, ``/`` between parts; names the outputs.
        path: where to read it.
        size_bytes: file size.
        mtime_ns: last modification; with the size it tells a changed file from an unchanged one.
        etag: what an object store calls the content; None for a local file.
        num_rows, num_row_groups: from the footer; None when the footer cannot be read.
        partitions: hive ``key=value`` folders of the path, in order.
        parts: what a large file is worked on in, from its footer alone; empty for others. Such a shard handed out
            whole is put together from its finished parts.
        part: which of them this is; None for the whole shard.
    """

    key: str
    path: str
    size_bytes: int
    mtime_ns: int
    num_rows: int | None = None
    num_row_groups: int | None = None
    partitions: dict[str, str | None] = field(default_factory=dict)
    etag: str | None = None
    parts: tuple[Part, ...] = ()
    part: Part | None = None

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Shard:
        part = document.get("part")
        parts = tuple(Part(**of_shard) for of_shard in document.get("parts", ()))
        return cls(**{**document, "parts": parts, "part": Part(**part) if part else None})

    @property
    def unit(self) -> str:
        """The name of this piece of work."""
        return self.key if self.part is None else f"{self.key}#{self.part.number}"

    @property
    def part_number(self) -> int | None:
        return None if self.part is None else self.part.number

    @property
    def rows_to_read(self) -> int | None:
        return self.num_rows if self.part is None else self.part.num_rows

    def output_name(self, folder: str) -> str:
        """Where its file of a kind goes: ``embeddings``, ``reuse`` or ``quarantine``."""
        if self.part is None:
            return f"{folder}/{self.key}.parquet"
        return f"{PARTS}/{self.key}/{self.part.number:05}.{folder}.parquet"

    def commit_name(self) -> str:
        return commit_name(self.key, self.part_number)

    def identity(self) -> dict[str, Any]:
        """What must be unchanged for a finished output to count as this shard's."""
        return {
            **({} if self.part is None else {"part": asdict(self.part)}),
            "path": self.path,
            "size_bytes": self.size_bytes,
            "mtime_ns": self.mtime_ns,
            **({"etag": self.etag} if self.etag else {}),
            "num_rows": self.num_rows,
            "num_row_groups": self.num_row_groups,
        }


def commit_name(key: str, part: int | None = None) -> str:
    """Where the commit record of a shard, or of one of its parts, stands."""
    return f"commits/{key}.json" if part is None else f"{PARTS}/{key}/{part:05}.json"


@dataclass(frozen=True)
class Window:
    """Consecutive rows of one shard as the reader hands them on.

    Attributes:
        first_row: position of the window's first row in the shard.
        table: the id column (named as in the output) and the carried columns; one row an input row.
        texts: one entry a row; None where there is none to embed.
        rejected: why, for the positions in the window whose text is None although the input is not null.
        origin: (num_rows,) int64, the input row of each entry where one input row may have several; otherwise None.
    """

    first_row: int
    table: pa.Table
    texts: list[str | None]
    rejected: dict[int, str] = field(default_factory=dict)
    origin: NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.texts)

    @property
    def rows(self) -> NDArray[np.int64]:
        """(num_rows,) the input row of each entry."""
        return self.origin if self.origin is not None else self.first_row + np.arange(self.num_rows, dtype=np.int64)

    @property
    def num_input_rows(self) -> int:
        return self.num_rows if self.origin is None else len(np.unique(self.origin))


@dataclass(frozen=True)
class Tokens:
    """Token ids of n texts, back to back.

    Attributes:
        input_ids: (T,) int32, special tokens included.
        lengths: (n,) int32, at least 1 each unless the tokenizer produced none.
        dropped: (n,) int64, tokens cut off each text at the length limit; a lower bound where a text was too long to be
            tokenised to its end.
    """

    input_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    dropped: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """(n,) where each text begins in ``input_ids``; kept, since every batch of a window asks for it."""
        starts: NDArray[np.int64] = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return starts


@dataclass(frozen=True)
class Batch:
    """What the encoder computes at once: n texts without padding.

    Attributes:
        input_ids: (T,) int32.
        cu_seqlens: (n + 1,) int32, text i is ``input_ids[cu_seqlens[i]:cu_seqlens[i + 1]]``.
        max_seqlen: longest text, in tokens.
        texts: (n,) int64, which texts of the window these are.
    """

    input_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    texts: NDArray[np.int64]

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.cu_seqlens)


@dataclass(frozen=True)
class EncoderSettings:
    """Everything the encoder needs to know, resolved: nothing here is 'auto' but dtype and attention.

    Attributes:
        model_path: a sentence-transformers folder on this machine.
        device: ``cpu``, ``cuda:0`` …
        dtype: ``auto`` | ``float32`` | ``float16`` | ``bfloat16``, the compute type.
        attention: ``auto`` | ``torch-varlen`` | ``flash-attn`` | ``grouped`` | ``padded``.
        prompt: put before each text; empty for none.
        max_length: token limit, special tokens included; None for the model's own.
        dimensions: Matryoshka cut, renormalised; None for all.
        normalize: None as the model folder says, True adds L2 normalisation, False removes it.
        trust_remote_code: run Python code that the model folder brings.
        compile: put the model through torch.compile.
    """

    model_path: str
    device: str = "cpu"
    dtype: str = "auto"
    attention: str = "auto"
    prompt: str = ""
    max_length: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    trust_remote_code: bool = False
    compile: bool = False


@dataclass
class Counters:
    """What a shard added up to. ``rows + extra_chunks == rows_out + sum(quarantined.values())`` always.

    Attributes:
        rows: input rows.
        rows_out: output rows, each with a vector.
        quarantined: rows without a vector, by reason.
        extra_chunks: output rows beyond one an input row, where long texts are cut into chunks.
        texts: different texts in each window.
        duplicates: rows whose text stood in their window before; encoded once.
        reused: texts whose vector was taken from the shard's previous output.
        tokens: real tokens of the texts; ``computed_tokens``: what went through the model, padding included.
        truncated_texts, dropped_tokens: rows cut at the length limit, and the tokens they lost.
        batches: forward passes.
        oom_splits: batches that did not fit the device and were halved.
    """

    rows: int = 0
    rows_out: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    extra_chunks: int = 0
    texts: int = 0
    duplicates: int = 0
    reused: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    truncated_texts: int = 0
    dropped_tokens: int = 0
    batches: int = 0
    oom_splits: int = 0

    def add(self, other: Counters) -> None:
        for name, value in asdict(other).items():
            if name == "quarantined":
                for reason, count in value.items():
                    self.quarantined[reason] = self.quarantined.get(reason, 0) + count
            else:
                setattr(self, name, getattr(self, name) + value)
