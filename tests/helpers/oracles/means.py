"""Robust means from their papers, in plain loops over NumPy arrays (float64).

Yin et al. 2018 (median, trimmed mean), Blanchard et al. 2017 (Krum), Pillutla et al. 2022 (the
geometric median), Karimireddy et al. 2022 (buckets).
"""

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def plain(x: Array, w: Array) -> Array:
    found: Array = np.sum(w[:, None] * x, axis=0) / np.sum(w)
    return found


def median(x: Array, w: Array) -> Array:
    """For each coordinate a point with at most half of the weight on either side of it; the mean of
    the two, weighted by their clients, if two of the values are such."""
    found = np.empty(x.shape[1])
    for j in range(x.shape[1]):
        good = [
            i
            for i in range(len(x))
            if w[[before(x, i, k, j) for k in range(len(x))]].sum() <= w.sum() / 2
            and w[[before(x, k, i, j) for k in range(len(x))]].sum() <= w.sum() / 2
        ]
        found[j] = sum(w[i] * x[i, j] for i in good) / sum(w[i] for i in good)
    return found


def before(x: Array, i: int, k: int, j: int) -> bool:
    """Whether client k comes before client i in the order of coordinate j."""
    return bool((x[k, j], k) < (x[i, j], i))


def trimmed(x: Array, w: Array, share: float) -> Array:
    """Take clients away from both ends of each coordinate while what was taken there has at most
    the share of the weight."""
    found = np.empty(x.shape[1])
    for j in range(x.shape[1]):
        order = sorted(range(len(x)), key=lambda i: (x[i, j], i))
        left = set(order)
        for end in (order, order[::-1]):
            taken = 0.0
            for i in end:
                taken += w[i]
                if taken > share * w.sum() + 1e-9:
                    break
                left.discard(i)
        found[j] = sum(w[i] * x[i, j] for i in left) / sum(w[i] for i in left)
    return found


def clipped(x: Array, w: Array) -> Array:
    norms = np.array([math.sqrt(float(row @ row)) for row in x])
    most = float(median(norms[:, None], w)[0])
    shorter = [
        row if norm <= most else row / norm * most for row, norm in zip(x, norms, strict=True)
    ]
    return plain(np.array(shorter), w)


def krum_scores(x: Array, f: int) -> Array:
    n = len(x)
    scores = np.empty(n)
    for i in range(n):
        away = sorted(float(np.sum((x[i] - x[j]) ** 2)) for j in range(n) if j != i)
        scores[i] = sum(away[: n - f - 2])
    return scores


def krum(x: Array, f: int) -> Array:
    found: Array = x[np.argmin(krum_scores(x, f))]
    return found


def multi_krum(x: Array, w: Array, f: int, m: int) -> Array:
    best = np.argsort(krum_scores(x, f), kind="stable")[:m]
    return plain(x[best], w[best])


def geometric(x: Array, w: Array) -> Array:
    """The minimum of the weighted sum of distances. It is one of the points if the others do not
    pull harder than that weighs; or else found by Newton's method with ever shorter steps: the
    function is convex, and strictly so unless all points are on a line."""
    for i in range(len(x)):
        away = np.delete(x, i, 0) - x[i]
        pull = np.delete(w, i) @ (away / np.linalg.norm(away, axis=1, keepdims=True))
        if np.linalg.norm(pull) <= w[i]:
            found: Array = x[i]
            return found
    z = plain(x, w)

    def height(z: Array) -> float:
        return float(sum(wi * np.linalg.norm(z - xi) for wi, xi in zip(w, x, strict=True)))

    for _ in range(200):
        slope, bend = np.zeros(len(z)), np.zeros((len(z), len(z)))
        for wi, xi in zip(w, x, strict=True):
            away = z - xi
            r = float(np.linalg.norm(away))
            slope += wi * away / r
            bend += wi * (np.eye(len(z)) / r - np.outer(away, away) / r**3)
        step, length = np.linalg.solve(bend, slope), 1.0
        close = np.linalg.norm(slope) < 1e-4 * w.sum()  # where heights differ by rounding alone
        while not close and height(z - length * step) > height(z):
            length /= 2
        z = z - length * step
        if np.linalg.norm(slope) < 1e-13 * w.sum():
            break
    return z


def buckets(x: Array, w: Array, size: int, order: list[int]) -> tuple[Array, Array]:
    """The mean of each bucket and its weight; order[i] is where client i stands after the
    shuffle."""
    stands = np.argsort(order)
    groups = [stands[start : start + size] for start in range(0, len(x), size)]
    means = np.array([plain(x[group], w[group]) for group in groups])
    return means, np.array([w[group].sum() for group in groups])
