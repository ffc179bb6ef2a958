"""Embed a corpus of Parquet shards and search it.

    from pipeline import embed_corpus, open_index

    report = embed_corpus("corpus/", "out/", model="models/all-MiniLM-L6-v2")
    open_index("out/").search(["a small boat"])

Importing this loads neither torch nor faiss.
"""

from __future__ import annotations

from pipeline.api import embed_corpus, open_index
from pipeline.errors import ConfigError, DataError, EmbedCorpusError, ModelError, ShardError, Stopped
from pipeline.telemetry import RunReport

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DataError",
    "EmbedCorpusError",
    "ModelError",
    "RunReport",
    "ShardError",
    "Stopped",
    "embed_corpus",
    "open_index",
]
