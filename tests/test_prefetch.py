"""The thread between two stages: order kept, bounded, errors passed on, no thread left behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.prefetch import Prefetch


def test_items_arrive_in_order() -> None:
    with Prefetch(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))


def test_the_source_runs_at_most_depth_items_ahead() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    with Prefetch(source(), depth=2) as items:
        for taken in items:
            time.sleep(0.005)
            assert len(made) <= taken + 4  # one taken, two queued, one waiting to be queued


def test_an_error_of_the_source_is_raised_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    got = []
    with Prefetch(source()) as items, pytest.raises(ValueError, match="broken"):
        got.extend(items)
    assert got == [1] or got == []


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    with Prefetch(itertools.count(), depth=1) as items:
        assert next(iter(items)) == 0
    assert threading.active_count() == before
