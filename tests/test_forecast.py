"""What follows from a sample and its timed batches: computed by hand, without a worker."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pipeline.calibration import cost_terms, spread, windows
from pipeline.cost_model import fit_cost, student
from pipeline.forecast import (
    OTHER_LOAD,
    SHARD_S,
    Estimate,
    IndexPlan,
    Measured,
    disk_bytes,
    embedding,
    full_window_rows,
    half_width,
    index_plan,
    makespan,
    memory_bytes,
    whole_run,
)
from pipeline.index_choice import IndexOptions
from pipeline.records import Shard
from pipeline.sample import Sample


def measured(**changed: Any) -> Measured:
    """Four rows of 2, 2, 6 and no tokens; a batch takes 0.1 s a token."""
    answer = {
        "pieces": [1, 1, 1, 0], "lengths": [2, 2, 6], "dropped": [0, 0, 4], "tokenize_s": 0.04, "padded": False,
        "timed": [[10, 100, 1, 1.0], [20, 200, 1, 2.0]], "peak_memory_bytes": 1000, **changed,
    }  # fmt: skip
    sample = Sample(texts=["ab", "cd", "efghij", ""], spots=[2, 2], every_row=not changed.get("spots"))
    return Measured.of(answer, sample, budget=6, window_rows=4)


def test_a_mean_has_no_band_where_every_row_was_read() -> None:
    assert measured().tokens_a_row() == (2.5, 0.0)
    assert measured().truncated_share() == pytest.approx(1 / 3)


def test_the_band_comes_from_how_neighbouring_spots_differ() -> None:
    mean, half = measured(spots=True).tokens_a_row()  # spots of 2 and 3 tokens a row
    assert (mean, half) == (2.5, half_width(np.array([2.0, 3.0])))
    assert half == student(2) * math.sqrt(0.5 / 2)


def test_a_shard_is_as_many_windows_as_it_has_rows_for() -> None:
    # A window of 4 rows is planned as [6] and [2, 2]: two batches, ten tokens.
    assert measured().shard(4) == pytest.approx((2, 1.0))
    assert measured().shard(8) == pytest.approx((4, 2.0))


def test_seconds_are_those_of_the_device_that_is_done_last() -> None:
    shards = [Shard("a", "a", 1, 1, num_rows=4), Shard("b", "b", 1, 1, num_rows=4), Shard("c", "c", 1, 1, num_rows=8)]
    a_row_s = 0.25 + 0.01  # forward and tokenizer share the cores
    batches, seconds = embedding(measured(), shards, ["cpu"], vectors=0, dim=8)
    assert batches == pytest.approx(8)
    assert seconds == pytest.approx(16 * a_row_s + 3 * SHARD_S)
    _, on_two = embedding(measured(), shards, ["cpu", "cpu"], vectors=0, dim=8)
    assert on_two == pytest.approx(12 * a_row_s + 2 * SHARD_S)
    _, on_gpu = embedding(measured(), shards[:1], ["cuda:0"], vectors=0, dim=8)
    assert on_gpu == pytest.approx(4 * a_row_s + SHARD_S)  # the first window waits for its tokens


def test_the_band_of_a_run_is_never_below_what_other_load_may_cost() -> None:
    estimate = whole_run(measured(), load_s=0.0, embed_s=10.0, index_s=0.0)
    assert estimate.value == 10
    assert estimate.high - 10 >= 10 * OTHER_LOAD
    assert Estimate.around(1, 2).low == 0
    assert Estimate(1, 0.5, 2).times(3) == Estimate(3, 1.5, 6)


def test_windows_end_at_the_rows_or_bytes_of_the_run() -> None:
    few = [Shard("a", "a", 1, 1, num_rows=7), Shard("b", "b", 1, 1)]
    many = [Shard("a", "a", 1, 1, num_rows=10**6)]
    assert full_window_rows(few, Sample(texts=["ab"])) == 7
    assert full_window_rows(many, Sample(texts=["ab"])) == 16_384
    assert full_window_rows(many, Sample(texts=["a" * (1 << 20)])) == 32


def test_memory_and_disk_leave_out_an_index_whose_size_is_not_known() -> None:
    known, unknown = index_plan(IndexOptions(), 1000, 64), IndexPlan("IVF16,ITQ16,LSH", None, 0)
    assert known is not None
    assert (known.factory, known.size_bytes, known.num_train) == ("IDMap2,Flat", 1000 * (4 * 64 + 8), 0)
    assert index_plan(None, 1000, 64) is index_plan(IndexOptions(), 0, 64) is None
    assert disk_bytes("float16", 10.0, 1000, 64, None) == {
        "embeddings": 1000 * (2 * 64 + 10), "reuse": 16_000, "total": 1000 * (2 * 64 + 10) + 16_000,
    }  # fmt: skip
    assert disk_bytes("float32", 0.0, 1000, 64, unknown)["total"] is None
    assert memory_bytes(measured(), 2, 64, None) > memory_bytes(measured(), 1, 64, None)
    assert memory_bytes(measured(), 1, 64, IndexPlan("Flat", 10**10, 0, [], 10**10)) > 10**10


def test_coefficients_are_found_and_never_negative() -> None:
    terms = np.array([cost_terms(np.full(n, length, np.int32), padded=False) for n, length in
                      [(100, 5), (50, 10), (20, 40), (8, 100), (2, 500), (1, 512), (30, 17)]])  # fmt: skip
    wanted = np.array([1e-4, 1e-7, 0.01])
    found, scatter = fit_cost(np.column_stack([terms, terms @ wanted]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert scatter < 1e-6
    found, _ = fit_cost(np.column_stack([terms, np.arange(7, 0, -1)]))
    assert (found >= 0).all()
    found, _ = fit_cost(np.array([[100.0, 1.0, 1.0, 2.0], [200.0, 2.0, 1.0, 4.0]]))
    np.testing.assert_allclose(found, [0.02, 0, 0])


def test_windows_repeat_a_small_sample_and_share_out_a_large_one() -> None:
    pieces = np.array([1, 0, 2])
    [window] = windows(pieces, 6)
    assert sorted(window.tolist()) == [0, 0, 1, 1, 2, 2]
    assert sorted(np.concatenate(windows(pieces, 1)).tolist()) == [0, 1, 2]
    assert spread(5) == [0, 4, 2, 1, 3]
    assert cost_terms(np.array([3, 5], np.int32), padded=True) == (10, 50, 1)


def test_shards_are_dealt_out_as_devices_become_free() -> None:
    assert makespan([4, 1, 1, 1], 2) == 4
    assert makespan([1, 1, 4], 2) == 5
    assert makespan([], 3) == 0
