from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batcher import pack, plan_batches
from pipeline.records import Tokens

lengths_strategy = st.lists(st.integers(0, 300), max_size=60).map(lambda xs: np.array(xs, np.int32))


def make_tokens(lengths: list[int]) -> Tokens:
    """Text i is made of the numbers 1000 * i, 1000 * i + 1, …"""
    ids = [1000 * text + place for text, length in enumerate(lengths) for place in range(length)]
    return Tokens(np.array(ids, np.int32), np.array(lengths, np.int32))


@given(lengths_strategy, st.integers(1, 500), st.booleans())
def test_every_text_is_in_exactly_one_batch(lengths: np.ndarray, budget: int, padded: bool) -> None:
    batches = plan_batches(lengths, budget, padded=padded)
    assert sorted(np.concatenate([*batches, np.array([], np.int64)])) == list(range(len(lengths)))
    assert all(len(batch) for batch in batches)


@given(lengths_strategy, st.integers(1, 500), st.booleans())
def test_a_batch_keeps_the_budget_unless_it_is_one_text(lengths: np.ndarray, budget: int, padded: bool) -> None:
    for batch in plan_batches(lengths, budget, padded=padded):
        own = lengths[batch].astype(int)
        cost = len(batch) * own.max() if padded else own.sum()
        assert cost <= budget or len(batch) == 1


@given(lengths_strategy, st.integers(1, 500), st.booleans())
def test_longest_texts_come_first_and_ties_keep_their_order(lengths: np.ndarray, budget: int, padded: bool) -> None:
    batches = plan_batches(lengths, budget, padded=padded)
    order = [(-int(lengths[i]), int(i)) for batch in batches for i in batch]
    assert order == sorted(order)


@given(lengths_strategy, st.integers(1, 500))
def test_no_batch_could_have_taken_the_next_text(lengths: np.ndarray, budget: int) -> None:
    batches = plan_batches(lengths, budget)
    for batch, following in pairwise(batches):
        assert int(lengths[batch].astype(int).sum()) + int(lengths[following[0]]) > budget


def test_the_docstring_example_holds() -> None:
    lengths = np.array([3, 5, 1, 3], np.int32)
    assert [b.tolist() for b in plan_batches(lengths, 8)] == [[1, 0], [3, 2]]
    assert [b.tolist() for b in plan_batches(lengths, 8, padded=True)] == [[1], [0, 3], [2]]


def test_no_texts_give_no_batches() -> None:
    assert plan_batches(np.array([], np.int32), 8) == []


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_batches(np.array([1], np.int32), 0)


def test_lengths_near_the_int32_limit_do_not_overflow() -> None:
    lengths = np.full(3, 2**30, np.int32)
    assert [b.tolist() for b in plan_batches(lengths, 2**31)] == [[0, 1], [2]]


def test_pack_lays_texts_back_to_back_in_the_asked_order() -> None:
    batch = pack(make_tokens([2, 1, 3]), np.array([2, 0]))
    assert batch.input_ids.tolist() == [2000, 2001, 2002, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert (batch.max_seqlen, batch.texts.tolist()) == (3, [2, 0])
    assert (batch.input_ids.dtype, batch.cu_seqlens.dtype, batch.texts.dtype) == (np.int32, np.int32, np.int64)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_pack_gives_each_text_its_own_tokens(lengths: list[int], data: st.DataObject) -> None:
    tokens = make_tokens(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    batch = pack(tokens, np.array(chosen, np.int64))
    for place, text in enumerate(chosen):
        own = batch.input_ids[batch.cu_seqlens[place] : batch.cu_seqlens[place + 1]]
        assert own.tolist() == [1000 * text + i for i in range(lengths[text])]
