"""Statistics over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean, stdev

import numpy as np

RESAMPLES = 9999
EXACT_UP_TO = 12


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean. With one value it is that value."""
    array = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(array), size=(RESAMPLES, len(array)))
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(array[drawn].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201,
       2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip
"""The 97.5 % point of Student's distribution, by degrees of freedom; 1.96 beyond."""


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; without end if there is one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    freedom = len(values) - 1
    t = T95[freedom] if freedom < len(T95) else 1.96
    half = t * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided paired test that the mean difference is zero, by flipping signs.

    Exact (all 2^n flips) up to 12 pairs, drawn at random beyond. With n pairs the smallest
    possible value is 2^(1-n): three seeds cannot show less than .25.
    """
    array = np.asarray(differences, dtype=float)
    if len(array) <= EXACT_UP_TO:
        signs = np.array(list(product((1.0, -1.0), repeat=len(array))))
        extra = 0
    else:
        signs = np.random.default_rng(seed).choice((1.0, -1.0), size=(RESAMPLES, len(array)))
        extra = 1  # the observed signs count as one of the draws
    means, observed = np.abs((signs * array).mean(axis=1)), abs(array.mean())
    as_extreme = (means >= observed * (1 - 1e-12)).sum()
    return float((as_extreme + extra) / (len(signs) + extra))
