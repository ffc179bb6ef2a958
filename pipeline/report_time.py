"""When records were worked on -> how long at least one device was at work, and tokens a second over time.

The time axis leaves out long stops, so that a job that runs an hour every night is seen as those hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.report_records import Record, iso

BRIDGED_S = 2.0  # a record's time is in whole seconds: a shorter gap between two shards is none
STOP_S = 60.0  # a longer one, of more than a hundredth of the time worked, is left out of the axis
MAX_BINS = 100
NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
Times = NDArray[np.float64]


def times(records: Sequence[Record]) -> tuple[Times, Times]:
    """(n,) each: when each record began and ended."""
    return (
        np.array([record.began for record in records], np.float64),
        np.array([record.ended for record in records], np.float64),
    )


def segments(began: Times, ended: Times, bridged_s: float) -> Times:
    """(segments, 2) the time that is covered, in order; gaps of up to ``bridged_s`` count as covered."""
    if not len(began):
        return np.zeros((0, 2))
    order = np.argsort(began, kind="stable")
    starts, ends = began[order], np.maximum.accumulate(ended[order])
    first = np.flatnonzero(np.r_[True, starts[1:] > ends[:-1] + bridged_s])
    return np.stack([starts[first], ends[np.r_[first[1:] - 1, len(ends) - 1]]], axis=1)


def covered_s(began: Times, ended: Times) -> float:
    """Seconds in which at least one record was worked on."""
    return float(_lengths(segments(began, ended, BRIDGED_S)).sum())


def _lengths(of: Times) -> Times:
    lengths: Times = of[:, 1] - of[:, 0]
    return lengths


def throughput(records: Sequence[Record]) -> dict[str, Any]:
    """Tokens a second over time: each record's are spread evenly over its time; stops are cut out of the axis."""
    began, ended = _joined(records), times(records)[1]
    worked_s = covered_s(began, ended)
    covered = segments(began, ended, max(STOP_S, worked_s / 100))
    at = np.cumsum(_lengths(covered)) - _lengths(covered)
    length_s = float(_lengths(covered).sum())
    edges = _edges(length_s)
    if len(edges) < 2:
        return {"bin_s": None, "length_s": 0.0, "bins": [], "segments": []}
    of = np.searchsorted(covered[:, 0], began, side="right") - 1
    start = began - covered[of, 0] + at[of]
    took = np.maximum(ended - began, 1e-3)
    tokens = np.array([record.counts.tokens for record in records], np.float64)
    walls = np.array([record.wall_s for record in records], np.float64)
    done = [np.clip((edge - start) / took, 0.0, 1.0) for edge in edges]  # of each record, up to each edge
    widths = np.diff(edges)
    rates = np.diff([float(share @ tokens) for share in done]) / widths
    devices = np.diff([float(share @ walls) for share in done]) / widths
    return {
        "bin_s": float(widths[0]),
        "length_s": round(length_s, 3),
        "bins": [
            {"at_s": round(float(edge), 3), "tokens_per_s": round(float(speed), 1), "devices": round(float(busy), 2)}
            for edge, speed, busy in zip(edges, rates, devices, strict=False)
        ],
        "segments": [
            {"at_s": round(float(where), 3), "began": iso(float(first)), "length_s": round(float(end - first), 3)}
            for where, (first, end) in zip(at, covered, strict=True)
        ],
    }


def _joined(records: Sequence[Record]) -> Times:
    """(n,) when each began, where what is lost of its time by rounding to seconds makes no gap before it."""
    last, began = dict[tuple[str, str], float](), []
    for record in records:
        before = last.get((record.host, record.device), -np.inf)
        began.append(before if abs(record.began - before) <= 1.0 else record.began)
        last[record.host, record.device] = record.ended
    return np.array(began, np.float64)


def _edges(length_s: float) -> Times:
    """Of bins of equal width; the last one may be up to a half wider or narrower."""
    if length_s <= 0:
        return np.zeros(0)
    days = 86400 * np.ceil(length_s / MAX_BINS / 86400)
    width = next((width for width in NICE_S if length_s / width <= MAX_BINS), float(days))
    inner = np.arange(0.0, length_s, width)
    if len(inner) > 1 and length_s - inner[-1] < width / 2:
        inner = inner[:-1]
    return np.append(inner, length_s)
