"""What a worker is told when it starts; apart from the worker so that the coordinator need not import its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.records import EncoderSettings
from pipeline.shards import Columns


@dataclass(frozen=True)
class WorkerSettings:
    """The first message to a worker.

    Attributes:
        encoder: how to load the model.
        output: the output folder; empty for a worker that only embeds queries.
        columns: which input columns are read.
        id_name: name of the key in the output.
        embedding_dtype: stored type.
        max_batch_tokens: token budget of a batch; 0 for the one that suits model and device, see ``tuning``.
        tune: find out what the device can do, also where the budget is given; for attribution.
        fingerprint: of the run, for the commit records.
        long_texts: ``truncate``, or ``chunk``: one output row for each piece of a text above the limit.
        chunk_overlap: tokens that neighbouring chunks share; None for an eighth.
        tokenizer_workers: processes that tokenize for this worker; 0 for none.
        price_per_hour: of this worker's device; None where it is not known.
        offline: the model hub is not asked; it must be where shards are read from it.
        stand_in: ``module:function`` that returns an encoder, instead of loading the model; for tests and measuring.
    """

    encoder: EncoderSettings
    output: str = ""
    columns: Columns = field(default_factory=lambda: Columns("text", None))
    id_name: str = "id"
    embedding_dtype: str = "float32"
    max_batch_tokens: int = 0
    tune: bool = False
    fingerprint: str = ""
    long_texts: str = "truncate"
    chunk_overlap: int | None = None
    tokenizer_workers: int = 0
    price_per_hour: float | None = None
    offline: bool = True
    stand_in: str | None = None

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> WorkerSettings:
        columns = document["columns"]
        return cls(
            **{
                **document,
                "encoder": EncoderSettings(**document["encoder"]),
                "columns": Columns(columns["text"], columns["id"], tuple(columns["carried"])),
            }
        )
