"""Statistics over seeds."""

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean, stdev

import numpy as np

from prefed.core.errors import PrefedError

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


def student(freedom: int, level: float = 0.95) -> float:
    """The two-sided quantile of Student's t distribution: P(|T| <= student) = level."""
    try:
        from scipy.special import stdtrit  # scipy.stats takes a second to import
    except ImportError:
        raise PrefedError("Student's t needs SciPy: pip install 'prefed[stats]'") from None
    # Versions of SciPy may differ in the last bits; tables and their tests should not.
    return round(float(stdtrit(freedom, (1 + level) / 2)), 9)


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; infinite for less than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
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
