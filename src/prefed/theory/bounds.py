"""Lemma 1, Theorems 1 and 2 and both corollaries of the paper, as printed and with O(.) read as a
factor of one; and what is measured beside them.

docs/theory.md says which of the statements cannot be right, and why; tests/theory has the smallest
counterexamples. Where a statement can be corrected, the corrected one is here too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.layout import Layout
from prefed.experiments.stats import student
from prefed.rules import Field, Rule
from prefed.rules.rule import State


@dataclass(frozen=True)
class Known:
    """The constants that the statements speak of."""

    L: float
    G: float
    local: float
    """sigma_l^2, the sum over coordinates."""
    spread: float
    """sigma_g^2."""
    gap: float
    """F(w0) - F*."""
    d: int


def admissible(L: float, K: int) -> float:
    """The largest client step of Lemma 1: 1 / (sqrt(5) K L)."""
    return 1 / (math.sqrt(5) * K * L)


# -- Lemma 1: how far a client's model is from the server's -----------------------------------


def lemma1_prefed(c: Known, K: int, tau: float, gradient: float) -> float:
    """Case I as printed; `gradient` is E|grad F(w_t)|^2."""
    return lemma1_prefedopt(c, K, gradient) / tau**2


def lemma1_prefedopt(c: Known, K: int, gradient: float) -> float:
    """Case II as printed. The step size does not occur: the bound is that of the largest one."""
    return 5 / (c.L**2 * K) * (c.local + 5 * K * c.spread) + 25 / c.L**2 * gradient


def lemma1_corrected(c: Known, K: int, step: float, gradient: float) -> float:
    """Reddi et al. 2021, Lemma 3, for steps of at most step * g with step <= 1 / (8 K L). PreFed's
    are with step = eta / tau, PreFedOpt's with step = eta_l."""
    return 5 * K * step**2 * (c.local + 6 * K * c.spread) + 30 * K**2 * step**2 * gradient


# -- Theorem 1 and its corollary: PreFed --------------------------------------------------------


def sigma1(c: Known, K: int, m: int) -> float:
    return c.local + (5 * K + 3 / (2 * m)) * c.spread


def theorem1(c: Known, T: int, K: int, m: int, eta: float) -> float:
    C1 = 2 * m / (75 * eta) * c.gap + c.L / (5 * K) * sigma1(c, K, m)
    return (C1 + c.G**2 * (c.L * eta + 3) / 75 * m) / T


def corollary1(c: Known, T: int, K: int, m: int) -> float:
    return sum(corollary1_terms(c, T, K, m))


def corollary1_eta(K: int, m: int) -> float:
    return 2 * math.sqrt(m) / (75 * math.sqrt(K))


def corollary1_terms(c: Known, T: int, K: int, m: int) -> tuple[float, float, float, float]:
    """As printed. The first is not what the theorem gives: that is gap * sqrt(K m) / T."""
    return (
        c.gap / (T * math.sqrt(K * m)),
        c.L * sigma1(c, K, m) / (5 * T * K),
        m * c.G**2 / (25 * T),
        2 * c.L * m**1.5 * c.G**2 / (75**2 * math.sqrt(K) * T),
    )


# -- Theorem 2 and its corollary: PreFedOpt -----------------------------------------------------


def theorem2(c: Known, T: int, K: int, m: int, eta: float, tau: float) -> float:
    C1 = c.gap / eta + 5 * eta / 2 * sigma2(c, K)
    C2 = eta * K * c.G**2 / tau + eta * c.L / 2
    return (c.G / math.sqrt(T) + tau / (eta * K * T)) * (C1 + C2 * smaller(c, T, K, m, eta, tau))


def sigma2(c: Known, K: int) -> float:
    return c.local + 5 * K * c.spread


def smaller(c: Known, T: int, K: int, m: int, eta: float, tau: float) -> float:
    """min(C3, C4)"""
    C3 = c.d * (1 + math.log1p(eta * K**2 * c.G**2 * T / tau**2))
    C4 = 16 * eta * K * T / (m * tau) * c.local
    C4 += (16 * eta**4 * K**3 * c.L**2 * T + 4 * eta**2 * K**2 * T) * sigma2(c, K)
    return min(C3, C4)


def corollary2_eta(c: Known, K: int, m: int) -> float:
    return math.sqrt(c.G * K * m)


def corollary2(c: Known, T: int, K: int, m: int, tau: float) -> float:
    return sum(corollary2_terms(c, T, K, m, tau))


def corollary2_terms(c: Known, T: int, K: int, m: int, tau: float) -> tuple[float, float, float]:
    """As printed. The theorem gives sqrt(G) above the line in the first, and G / sqrt(T) in place
    of 1 / T in the others."""
    eta = corollary2_eta(c, K, m)
    return (
        c.gap / math.sqrt(c.G * K * m * T),
        5 * eta * sigma2(c, K) / (2 * T),
        eta * c.L / (2 * T) * smaller(c, T, K, m, eta, tau),
    )


# -- What is measured beside them ---------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """The exponent p of a law y = c x^p, and a 95 % interval of it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def fit(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares in logarithms."""
    a, b = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    a = a - a.mean()
    slope = float(a @ b / (a @ a))
    if len(a) < 3:
        return Slope(slope, -math.inf, math.inf)
    rest = b - b.mean() - slope * a
    half = student(len(a) - 2) * math.sqrt(float(rest @ rest) / (len(a) - 2) / float(a @ a))
    return Slope(slope, slope - half, slope + half)


@dataclass
class Divergence:
    """Collects |w_{i,k} - w_t|^2 while clients train: the mean over clients for each k."""

    sums: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, k: int, squares: Tensor) -> None:
        self.sums[k] = self.sums.get(k, 0.0) + float(squares.double().sum())
        self.counts[k] = self.counts.get(k, 0) + squares.numel()

    def largest(self) -> float:
        """Over k = 1, ..., K - 1 (zero if K is 1); and forget."""
        means = [self.sums[k] / self.counts[k] for k in self.sums]
        self.sums.clear()
        self.counts.clear()
        return max(means, default=0.0)


class Watched(Rule):
    """A client rule that notes, before each step, how far the client has gone."""

    elementwise = False

    def __init__(self, rule: Rule, divergence: Divergence) -> None:
        self.rule, self.divergence = rule, divergence
        self.start: Tensor | None = None

    def fit(self, layout: Layout) -> "Watched":
        return Watched(self.rule.fit(layout), self.divergence)

    def fused(self, w: Tensor) -> "Watched":
        return Watched(self.rule.fused(w), self.divergence)

    def fields(self, layout: Layout) -> dict[str, Field]:
        return self.rule.fields(layout)

    def begin(self, w: Tensor, state: State) -> None:
        self.start = w.clone()
        self.rule.begin(w, state)

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        assert self.start is not None
        if k > 0:
            self.divergence.add(k, (w - self.start).square_().sum(-1))
        self.rule.apply(w, g, state, lr, k)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        self.rule.finish(w, state, lr, steps)


def watch(algorithm: Algorithm) -> tuple[Algorithm, Divergence]:
    """The same algorithm, with its clients' divergence noted."""
    divergence = Divergence()
    kind: Any = type(algorithm)

    def client_rule(self: Algorithm) -> Rule:
        return Watched(kind.client_rule(self), divergence)

    watched = type(kind.__name__, (kind,), {"client_rule": client_rule, "__module__": __name__})
    return watched(**algorithm.model_dump()), divergence
