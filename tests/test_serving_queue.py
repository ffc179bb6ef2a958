"""The rules by which waiting calls become batches, with a clock that the test sets."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.request_queue import BULK_SHARE, Limits, Piece, QueueFull, Request, RequestQueue

Dropped = list[tuple[Request, str]]


def queue_of(**limits: Any) -> tuple[RequestQueue, Dropped]:
    dropped: Dropped = []
    defaults: dict[str, Any] = {"max_batch_tokens": 100, "max_queue_tokens": 10_000, "max_delay_s": 0.01}
    return RequestQueue(Limits(**{**defaults, **limits}), lambda request, why: dropped.append((request, why))), dropped


def call(*lengths: int, lane: Literal["query", "bulk"] = "query", **options: Any) -> Request:
    return Request(np.array(lengths, np.int32), lane=lane, **options)


def lengths_of(pieces: list[Piece]) -> list[int]:
    return [int(length) for piece in pieces for length in piece.request.lengths[piece.texts]]


def test_a_free_device_gets_whatever_waits_at_once() -> None:
    queue, _ = queue_of()
    queue.put(call(3), now=0.0)
    assert lengths_of(queue.take(0.0, device_free=True)) == [3]
    assert queue.take(0.0, device_free=True) == [] and queue.tokens == 0 and len(queue) == 0


def test_a_batch_behind_another_one_waits_until_its_oldest_call_has_waited_long_enough() -> None:
    queue, _ = queue_of(max_delay_s=0.010)
    queue.put(call(3), now=1.000)
    queue.put(call(4), now=1.009)
    assert queue.take(1.0099, device_free=False) == []
    assert queue.closes_at() == pytest.approx(1.010)
    assert lengths_of(queue.take(1.010, device_free=False)) == [3, 4]
    assert queue.closes_at() is None


def test_a_batch_behind_another_one_goes_as_soon_as_its_token_budget_is_full() -> None:
    queue, _ = queue_of(max_batch_tokens=100)
    queue.put(call(60), now=0.0)
    assert queue.take(0.0, device_free=False) == []
    queue.put(call(40), now=0.0)
    assert lengths_of(queue.take(0.0, device_free=False)) == [60, 40]


def test_a_batch_behind_another_one_goes_as_soon_as_it_has_its_number_of_texts() -> None:
    queue, _ = queue_of(max_batch_size=3)
    queue.put(call(1, 1), now=0.0)
    assert queue.take(0.0, device_free=False) == []
    queue.put(call(1, 1), now=0.0)
    assert lengths_of(queue.take(0.0, device_free=False)) == [1, 1, 1]
    assert queue.tokens == 1


def test_a_batch_holds_no_more_tokens_than_its_budget() -> None:
    queue, _ = queue_of(max_batch_tokens=10)
    for length in (4, 5, 2):
        queue.put(call(length), now=0.0)
    assert lengths_of(queue.take(0.0, device_free=True)) == [4, 5]
    assert lengths_of(queue.take(0.0, device_free=True)) == [2]


def test_a_text_above_the_budget_is_a_batch_of_its_own() -> None:
    queue, _ = queue_of(max_batch_tokens=10)
    for length in (3, 25, 3):
        queue.put(call(length), now=0.0)
    assert [lengths_of(queue.take(0.0, device_free=True)) for _ in range(3)] == [[3], [25], [3]]


def test_a_long_text_is_not_passed_by_younger_short_ones() -> None:
    queue, _ = queue_of(max_batch_tokens=10)
    for length in (3, 9, 1, 1):
        queue.put(call(length), now=0.0)
    assert lengths_of(queue.take(0.0, device_free=True)) == [3]
    assert lengths_of(queue.take(0.0, device_free=True)) == [9, 1]


def test_a_list_larger_than_a_batch_is_split_with_texts_of_like_length_together() -> None:
    queue, _ = queue_of(max_batch_tokens=12)
    queue.put(call(2, 6, 2, 6, 2, 6), now=0.0)
    batches = []
    while pieces := queue.take(0.0, device_free=True):
        batches.append(lengths_of(pieces))
    assert batches == [[6, 6], [6, 2, 2, 2]]


def test_queries_go_before_bulk_that_came_earlier() -> None:
    queue, _ = queue_of()
    queue.put(call(50, lane="bulk"), now=0.0)
    queue.put(call(5), now=1.0)
    assert lengths_of(queue.take(1.0, device_free=True)) == [5]
    assert lengths_of(queue.take(1.0, device_free=True)) == [50]


def test_bulk_gets_its_share_of_the_tokens_under_a_flood_of_queries() -> None:
    queue, _ = queue_of(max_batch_tokens=100, max_queue_tokens=1 << 20, max_requests=1 << 20)
    for _ in range(100):
        queue.put(call(100), now=0.0)
        queue.put(call(100, lane="bulk"), now=0.0)
    lanes = [queue.take(0.0, device_free=True)[0].request.lane for _ in range(80)]
    # A query batch owes bulk 100 * 0.25 / 0.75 tokens: after three of them it is a batch, so bulk has each fourth turn.
    assert lanes[:8] == ["query", "query", "query", "bulk"] * 2
    assert lanes.count("bulk") == 80 * BULK_SHARE


def test_what_bulk_is_owed_is_forgotten_when_none_of_it_waits() -> None:
    queue, _ = queue_of(max_batch_tokens=100)
    gone = call(100, lane="bulk")
    queue.put(gone, now=0.0)
    for number in range(4):
        queue.put(call(90), now=0.0)
        if number == 3:  # 90 tokens are owed by now; this batch would make it 120
            queue.remove(gone)
        assert queue.take(0.0, device_free=True)[0].request.lane == "query"
    queue.put(call(90, lane="bulk"), now=0.0)
    queue.put(call(90), now=0.0)
    assert queue.take(0.0, device_free=True)[0].request.lane == "query"


@pytest.mark.parametrize("lengths", [(40,), (10, 10, 10, 10), (1,) * 40])
def test_the_bound_in_tokens_is_the_same_for_one_text_and_for_a_list(lengths: tuple[int, ...]) -> None:
    queue, _ = queue_of(max_queue_tokens=100)
    queue.put(call(61), now=0.0)
    with pytest.raises(QueueFull, match="61 tokens"):
        queue.put(call(*lengths), now=0.0)
    assert queue.tokens == 61 and len(queue) == 1
    queue.put(call(*lengths[:-1], 1) if len(lengths) == 1 else call(*lengths[:-2], 1), now=0.0)


def test_calls_are_bounded_in_number_too() -> None:
    queue, _ = queue_of(max_requests=2)
    queue.put(call(1), now=0.0)
    queue.put(call(1, lane="bulk"), now=0.0)
    with pytest.raises(QueueFull, match="2 calls"):
        queue.put(call(1), now=0.0)


def test_a_call_larger_than_the_whole_queue_is_taken_when_the_queue_is_empty() -> None:
    queue, _ = queue_of(max_queue_tokens=10)
    queue.put(call(8, 8, 8), now=0.0)
    with pytest.raises(QueueFull):
        queue.put(call(1), now=0.0)


def test_a_call_past_its_deadline_is_dropped_before_it_is_computed() -> None:
    queue, dropped = queue_of()
    late, fine = call(5, deadline=1.0), call(6, deadline=2.0)
    queue.put(late, now=0.0)
    queue.put(fine, now=0.0)
    assert lengths_of(queue.take(1.0, device_free=True)) == [6]
    assert dropped == [(late, "deadline")] and queue.tokens == 0


def test_a_call_whose_caller_is_gone_is_dropped_before_it_is_computed() -> None:
    queue, dropped = queue_of()
    gone = call(5, is_cancelled=lambda: True)
    queue.put(call(4), now=0.0)
    queue.put(gone, now=0.0)
    assert lengths_of(queue.take(0.0, device_free=True)) == [4]
    assert dropped == [(gone, "cancelled")] and queue.tokens == 0


def test_a_dropped_call_does_not_close_a_batch_for_others() -> None:
    queue, _ = queue_of(max_delay_s=0.01)
    queue.put(call(5, deadline=0.005), now=0.0)
    queue.put(call(6), now=0.008)
    assert queue.take(0.010, device_free=False) == []
    assert queue.closes_at() == pytest.approx(0.018)


def test_the_rest_of_a_removed_call_is_not_computed() -> None:
    queue, _ = queue_of(max_batch_tokens=10)
    large = call(10, 10, 10)
    queue.put(large, now=0.0)
    queue.take(0.0, device_free=True)
    queue.remove(large)
    queue.remove(large)
    assert queue.take(0.0, device_free=True) == [] and queue.tokens == 0


def test_texts_whose_pooling_leaves_out_prompts_of_other_lengths_are_not_mixed() -> None:
    queue, _ = queue_of()
    for prompt_length in (0, 4, 0):
        queue.put(call(5, prompt_length=prompt_length), now=0.0)
    first, second = (queue.take(0.0, device_free=True) for _ in range(2))
    assert [piece.request.prompt_length for piece in first] == [0, 0]
    assert [piece.request.prompt_length for piece in second] == [4]


calls = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=12),
        st.sampled_from(["query", "bulk"]),
        st.sampled_from([math.inf, 3.0]),
    ),
    max_size=30,
)


@given(calls, st.integers(1, 60), st.integers(1, 9))
def test_every_text_is_computed_once_or_its_call_was_dropped(
    given_calls: list[tuple[list[int], Any, float]], budget: int, size: int
) -> None:
    queue, dropped = queue_of(max_batch_tokens=budget, max_batch_size=size, max_queue_tokens=1 << 30)
    requests = [call(*lengths, lane=lane, deadline=deadline) for lengths, lane, deadline in given_calls]
    seen: dict[Request, list[int]] = {request: [] for request in requests}
    for at, request in enumerate(requests):
        queue.put(request, now=at / 10)
    now = 1.0
    while pieces := queue.take(now, device_free=True):
        lengths = lengths_of(pieces)
        assert len(lengths) <= size and (sum(lengths) <= budget or len(lengths) == 1)
        assert len({piece.request.lane for piece in pieces}) == 1
        for piece in pieces:
            seen[piece.request] += piece.texts.tolist()
        now += 0.1
    assert queue.tokens == 0 and len(queue) == 0 and queue.closes_at() is None
    gone = {request for request, _ in dropped}
    for request, texts in seen.items():
        assert len(set(texts)) == len(texts)
        assert request in gone or sorted(texts) == list(range(len(request.lengths)))
