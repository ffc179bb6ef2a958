"""``index/index.json``: what an index says of itself, read whole or not at all."""

from __future__ import annotations

import math
from typing import Any

from pipeline.storage import Storage

NAME = "index/index.json"
VERSION = 1


def read_document(store: Storage) -> dict[str, Any] | None:
    """The document; None where there is none, or it is cut, of another version, or not as `indexer` writes it."""
    document = store.read_json(NAME)
    if not isinstance(document, dict) or document.get("version") != VERSION:
        return None
    try:
        _check(document)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return document


def _check(document: dict[str, Any]) -> None:
    """Raises an error where what opens or updates an index would stumble."""
    texts = [document[name] for name in ("fingerprint", "requested", "factory", "metric", "index_file", "ids_file")]
    str.strip("".join(texts))
    figures = [document["recall_at_10"]["value"], document["latency_ms"]["p50"], document["dim"]]
    figures += [document["bytes"][what] for what in ("index", "ids")]
    math.fsum(figures)
    str.strip(document["sha256"]["index"] + document["sha256"]["ids"])
    rows = ordinals = 0
    for shard in document["shards"]:
        str.strip(shard["key"] + shard["sha256"])
        rows, ordinals = rows + shard["rows"], max(ordinals, shard["ordinal"] + 1)
    if not 0 < rows == document["ntotal"] or not 0 < ordinals <= document["next_ordinal"]:
        raise ValueError("the shards do not make up the index")
    if (document["nprobe"] or 1) < 1:
        raise ValueError("nprobe")
