"""Measured batches into what a batch costs: seconds a token, a pair of tokens that attend, and a batch.

The three terms of a batch are `calibration.cost_terms`; a plan and the choice of the token budget share the fit.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

MIN_TIMED = 6  # batches below which one mean serves better than three coefficients


def fit_cost(timed: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Non-negative least squares of seconds on ``cost_terms``.

    Args:
        timed: (n, 4) three terms and the seconds of each batch.

    Returns:
        (3,) coefficients, and the half width of the 95 % band of the mean, as a share.
    """
    if not len(timed):
        return np.zeros(3), 0.0
    terms, seconds = timed[:, :3], timed[:, 3]
    best, smallest = np.array([seconds.sum() / max(1.0, terms[:, 0].sum()), 0.0, 0.0]), math.inf
    scale = np.maximum(terms.max(axis=0), 1.0)
    for chosen in _subsets(3) if len(timed) >= MIN_TIMED else []:
        found = np.linalg.lstsq(terms[:, chosen] / scale[chosen], seconds, rcond=None)[0] / scale[chosen]
        error = float(((terms[:, chosen] @ found - seconds) ** 2).sum())
        if (found >= 0).all() and error < smallest:
            best, smallest = np.zeros(3), error
            best[chosen] = found
    if len(timed) < 2 or not seconds.sum():
        return best, 1.0
    errors = terms @ best - seconds
    return best, student(len(timed)) * float(errors.std(ddof=1)) / math.sqrt(len(timed)) / float(seconds.mean())


def _subsets(num: int) -> list[list[int]]:
    sizes = range(num, 0, -1)
    return [list(chosen) for size in sizes for chosen in itertools.combinations(range(num), size)]


def student(num: int) -> float:
    """Half width of the 95 % band of a mean of ``num`` values in standard errors; within 2 % from 5 values on."""
    return 1.96 + 2.4 / max(1, num - 1) + 4.8 / max(1, num - 1) ** 2
