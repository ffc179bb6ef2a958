"""The sentence names what held the device up, and promises no more than the waiting it takes away."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.verdict import Load, verdict


def record(
    device: float, busy: dict[str, float] | None = None, peak_share: float | None = None, **stages: float
) -> Any:
    wall = {"wall": sum(stages.values())}
    return {
        "seconds": {**wall, **stages},
        "busy_seconds": {"device": device, **(busy or {})},
        "peak_share": peak_share,
    }


def test_a_device_that_computes_all_the_time_bounds_the_run() -> None:
    records = [record(49.0, encode=49.5, wait_for_input=0.5, peak_share=0.8)] * 2
    assert Load.of(records).idle == pytest.approx(0.02)
    said = verdict(records, 0, 4)
    assert said.startswith("device-bound: it computed 98% of the time, at 80% of its matrix-product peak")


def test_a_slow_tokenizer_is_told_how_many_more_keep_up() -> None:
    # One process gives texts at a third of the device's speed: 90 s of work, 30 s of computing.
    slow = [record(30.0, {"tokenize": 90.0, "read": 2.0}, encode=30.0, wait_for_input=60.0)]
    assert verdict(slow, 1, 8) == (
        "tokenizer-bound: the device waited 67% of the time; 2 more --tokenizer-workers would give about +200%"
    )
    assert "3 more --tokenizer-workers" in verdict(slow, 0, 8)  # of processes there was none
    assert "a machine with 2 more cores a device" in verdict(slow, 1, 0)


@pytest.mark.parametrize(
    ("busy", "stages", "said"),
    [
        ({"read": 80.0, "tokenize": 9.0}, {"wait_for_input": 50.0}, "reader-bound: the device waited 50% of the time"),
        ({"write": 99.0}, {"wait_for_writer": 50.0}, "writer-bound: the device waited 50% of the time"),
        ({}, {"pack": 20.0, "other": 30.0}, "host-bound: the device waited 50% of the time"),
        ({"chunk": 70.0, "tokenize": 9.0}, {"wait_for_input": 50.0}, "tokenizer-bound: the device waited 50%"),
    ],
)
def test_the_longest_wait_is_named(busy: dict[str, float], stages: dict[str, float], said: str) -> None:
    assert verdict([record(50.0, busy, encode=50.0, **stages)], 2, 4).startswith(said)
    assert "+100%" in verdict([record(50.0, busy, encode=50.0, **stages)], 2, 4)


def test_what_is_over_at_once_says_nothing() -> None:
    assert verdict([], 0, 1) == ""
    assert verdict([record(0.1, encode=0.2)], 0, 1) == ""
