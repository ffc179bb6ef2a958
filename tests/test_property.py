"""Any shard a writer can make: no row lost, none doubled, order kept, each vector sentence-transformers' own."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.ledger import Ledger
from pipeline.records import EncoderSettings
from pipeline.shards import Columns, find_shards
from pipeline.worker import Worker
from pipeline.worker_settings import WorkerSettings
from tests.conftest import vectors_of

TEXT = st.one_of(
    st.none(),
    st.text(max_size=40),  # any code point but lone surrogates
    st.sampled_from(["", " ", "\0", "[SEP]", "[CLS] [PAD] x", "boat", "Boat", "ß", "🚢🚢", "字" * 300, "word " * 400]),
)
KINDS: list[Any] = [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.fixture(scope="module")
def reference(model_dir: str) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(model_dir, device="cpu")


@pytest.fixture(scope="module")
def worker(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    output = str(tmp_path_factory.mktemp("property"))
    chosen = WorkerSettings(EncoderSettings(model_dir), output, Columns("text", "id"), max_batch_tokens=512)
    return Worker(chosen, lambda event, **values: None)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(texts=st.lists(TEXT, max_size=30), kind=st.sampled_from(KINDS), rows=st.integers(1, 40), data=st.data())
def test_rows_in_are_rows_out_plus_quarantined_in_order_with_reference_vectors(
    worker: Worker, reference: Any, texts: list[str | None], kind: pa.DataType, rows: int, data: st.DataObject
) -> None:
    texts = texts + data.draw(st.lists(st.sampled_from(texts), max_size=5)) if texts else texts
    column = pa.array(texts, pa.string())
    column = column.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else column.cast(kind)
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"id": range(len(texts)), "text": column}), f"{folder}/x.parquet", row_group_size=rows)
        [shard] = find_shards([folder])
        worker.run(iter([{"do": "shard", "shard": asdict(shard)}]))
    output = Path(worker._settings.output)
    record = Ledger(str(output)).record("x")
    assert record is not None
    table = pq.read_table(output / "embeddings" / "x.parquet")
    expected = [row for row, text in enumerate(texts) if text is not None]
    assert table["id"].to_pylist() == expected
    counts = record["counts"]
    assert counts["rows"] == len(texts) == counts["rows_out"] + sum(counts["quarantined"].values())
    if record["quarantine"] is not None:
        rejected = pq.read_table(output / "quarantine" / "x.parquet")
        assert rejected["row"].to_pylist() == [row for row, text in enumerate(texts) if text is None]
    present = [text for text in texts if text is not None]
    assert counts["duplicates"] == sum(count - 1 for count in Counter(present).values())
    if present:
        vectors = vectors_of(table)
        assert np.abs(vectors - reference.encode_document(present, show_progress_bar=False)).max() <= 1e-5
