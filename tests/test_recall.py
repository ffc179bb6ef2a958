"""Recall is measured, not assumed: the setting it chooses, and the limit below which nothing is published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import recall
from pipeline.errors import IndexingError
from pipeline.indexer import build_index
from tests.test_indexer import FakeOutput, hard


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    return FakeOutput(tmp_path / "out")


def test_queries_are_kept_out_of_training() -> None:
    queries, train = recall.draw(10_000, 5000)
    assert len(queries) == 200 and len(train) == 5000
    assert not set(queries.tolist()) & set(train.tolist())
    again, _ = recall.draw(10_000, 5000)
    assert np.array_equal(queries, again)


def test_nprobe_grows_with_the_limit(out: FakeOutput) -> None:
    out.add("a", hard())
    chosen = {}
    for limit in (0.3, 0.9, 1.0):
        result = build_index(str(out), "IVF64,Flat", min_recall=limit)
        assert result["recall_at_10"]["value"] >= limit
        chosen[limit] = result["nprobe"]
    assert chosen[0.3] < chosen[0.9] < chosen[1.0]


def test_reported_recall_is_what_an_independent_measurement_finds(out: FakeOutput) -> None:
    vectors = hard()
    out.add("a", vectors)
    result = build_index(str(out), "IVF64,Flat", min_recall=0.8)
    index = out.faiss_index()
    index.nprobe = result["nprobe"]
    exact = np.argsort(-(vectors[:1000] @ vectors.T), axis=1)[:, 1:11]
    found = index.search(vectors[:1000], 11)[1]
    recall = np.mean([len(set(exact[q]) & (set(found[q]) - {q})) / 10 for q in range(1000)])
    assert recall == pytest.approx(result["recall_at_10"]["value"], abs=0.05)


def test_nothing_is_published_below_the_limit(out: FakeOutput) -> None:
    out.add("a", hard(2000))
    with pytest.raises(
        IndexingError, match=r"IVF16,PQ2x4 reached recall@10 0\.\d+ at nprobe=\d+, below --min-recall 0.95"
    ):
        build_index(str(out), "IVF16,PQ2x4")
    assert not (out.root / "index/index.json").exists()
    build_index(str(out))
    before = out.document()
    with pytest.raises(IndexingError):
        build_index(str(out), "IVF16,PQ2x4")
    assert out.document() == before
    assert out.faiss_index().ntotal == 2000


def test_interval_is_never_a_single_point() -> None:
    assert recall.interval(1.0, 100) == pytest.approx((0.963, 1.0), abs=1e-3)
    low, high = recall.interval(0.95, 100)
    assert low < 0.92 and 0.97 < high < 1.0
