"""The paper's statements: arithmetic, measurements, and the smallest counterexamples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed.core.layout import Layout
from prefed.rules import Covariance
from prefed.theory import bounds
from prefed.theory.bounds import Known
from prefed.theory.quadratic import Quadratic

C = Known(L=2.0, G=3.0, local=0.7, spread=0.2, gap=5.0, d=4)


def test_statements_are_as_printed() -> None:
    """With numbers put into the formulas by hand."""
    assert bounds.admissible(2.0, 10) == pytest.approx(1 / (5**0.5 * 20))
    II = 5 / (4 * 10) * (0.7 + 50 * 0.2) + 25 / 4 * 9
    assert bounds.lemma1_prefedopt(C, 10, 9.0) == pytest.approx(II)
    assert bounds.lemma1_prefed(C, 10, 0.1, 9.0) == pytest.approx(100 * II)
    sigma = 0.7 + (50 + 3 / 12) * 0.2
    one = (12 / (75 * 0.3) * 5 + 2 / 50 * sigma + 9 * (0.6 + 3) / 75 * 6) / 7
    assert bounds.theorem1(C, T=7, K=10, m=6, eta=0.3) == pytest.approx(one)
    sigma = 0.7 + 50 * 0.2
    C1, C2 = 5 / 0.3 + 0.75 * sigma, 0.3 * 10 * 9 / 0.1 + 0.3
    C3 = 4 + 4 * math.log(1 + 0.3 * 100 * 9 * 7 / 0.01)
    C4 = 16 * 0.3 * 70 / 0.6 * 0.7 + (16 * 0.3**4 * 1000 * 4 * 7 + 4 * 0.09 * 700) * sigma
    two = (3 / 7**0.5 + 0.1 / 21) * (C1 + C2 * min(C3, C4))
    assert bounds.theorem2(C, T=7, K=10, m=6, eta=0.3, tau=0.1) == pytest.approx(two)


def test_corollary_1_does_not_follow_from_theorem_1() -> None:
    """With its own eta, three of the four terms agree and the first is upside down: the theorem has
    gap * sqrt(K m) / T, the corollary gap / (T sqrt(K m))."""
    T, K, m = 11, 10, 6
    eta = bounds.corollary1_eta(K, m)
    printed = bounds.corollary1_terms(C, T, K, m)
    first = C.gap * math.sqrt(K * m) / T
    assert first + sum(printed[1:]) == pytest.approx(bounds.theorem1(C, T, K, m, eta))
    assert first / printed[0] == pytest.approx(K * m)


def test_corollary_2_does_not_follow_from_theorem_2() -> None:
    """Only the leading factor G / sqrt(T): the corollary is smaller by G in the first term and by
    G sqrt(T) in the others, and leaves out the part of C2 that has G^2 / tau."""
    T, K, m, tau = 10_000, 10, 6, 0.1
    eta = bounds.corollary2_eta(C, K, m)
    printed = bounds.corollary2_terms(C, T, K, m, tau)
    lead = C.G / math.sqrt(T)
    assert lead * C.gap / eta / printed[0] == pytest.approx(C.G)
    assert lead * 2.5 * eta * bounds.sigma2(C, K) / printed[1] == pytest.approx(C.G * T**0.5)
    C5 = bounds.smaller(C, T, K, m, eta, tau)
    assert lead * eta * C.L / 2 * C5 / printed[2] == pytest.approx(C.G * T**0.5)
    assert bounds.corollary2(C, T, K, m, tau) < bounds.theorem2(C, T, K, m, eta, tau) / 100


def descend(steps: int, lr: float, start: float = 1.0, **rule: Any) -> list[float]:
    """|w_k - w_0|^2 for F = w^2 / 2 in one dimension, one client, no noise."""
    chosen = Covariance(**rule)
    w = torch.tensor([start], dtype=torch.float64)
    layout = Layout.of([("w", w)])
    state = {n: f.new(w) for n, f in chosen.fields(layout).items()}
    found = []
    for k in range(steps):
        chosen.step(w, w.clone(), state, lr, k)
        found.append(float((w[0] - start) ** 2))
    return found


def test_lemma_1_case_1_lacks_tau_in_its_condition() -> None:
    """One dimension, one client, no noise, beta1 = 0: PreFed is gradient descent with eta / tau. At
    the largest admissible eta, tau = .01 and K = 10 it has left the printed bound behind by a
    factor of 10^4; with eta <= tau / (8 K L) the corrected bound holds."""
    K, tau = 10, 0.01
    c = Known(L=1.0, G=1.0, local=0.0, spread=0.0, gap=0.5, d=1)
    eta = bounds.admissible(1.0, K)
    gone = max(descend(K - 1, eta, beta1=0.0, tau=tau))
    assert gone > 1e4 * bounds.lemma1_prefed(c, K, tau, gradient=1.0)
    small = tau / (8 * K)
    gone = max(descend(K - 1, small, beta1=0.0, tau=tau))
    assert gone < bounds.lemma1_corrected(c, K, small / tau, gradient=1.0)


def test_theorem_1_does_not_know_tau() -> None:
    """One dimension, one client, no noise: with tau = 10^6 PreFed does not move, the gradient stays
    what it was, and the bound falls like 1/T: no constant in O(.) can mend that."""
    eta, ratios = 0.1, []
    for T in (10, 1000, 100_000):
        gone = descend(1, eta * T, beta1=0.0, tau=1e6)[0]  # T steps that do not move: one of T
        gradient = (1 - math.sqrt(gone)) ** 2
        gap = 0.5 - 0.5 * gradient  # F(w_0) - F(w_{T-1}), as the theorem has it
        c = Known(L=1.0, G=1.0, local=0.0, spread=0.0, gap=gap, d=1)
        ratios.append(gradient / bounds.theorem1(c, T, K=1, m=1, eta=eta))
    assert ratios[0] > 10
    assert ratios[1] / ratios[0] == pytest.approx(100, rel=0.05)
    assert ratios[2] / ratios[1] > 50


def noisy_gradients(T: int, lr: float, rows: int = 400, **rule: Any) -> np.ndarray[Any, Any]:
    """E|grad F(w_t)|^2 for F = w^2 / 2 with noise of variance 1, one client, K = 1. The rows are
    independent repetitions."""
    chosen = Covariance(**rule)
    generator = torch.Generator().manual_seed(0)
    w = torch.full((rows, 1), 3.0, dtype=torch.float64)
    layout = Layout.of([("w", w[0])])
    state = {n: f.new(w, rows) for n, f in chosen.fields(layout).items()}
    found = []
    for _ in range(T):
        found.append(float(w.square().mean()))
        noise = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
        chosen.step(w, w + noise, state, lr, 0)
    return np.minimum.accumulate(found)


@pytest.mark.parametrize("rule", [{"step_with": "m"}, {"step_with": "g", "beta2": 0.99}], ids=str)
def test_a_constant_step_has_a_noise_floor_and_the_theorems_have_none(rule: dict[str, Any]) -> None:
    """PreFed (m) and PreFedOpt (g, on the server) with EMA: from T = 250 to 4000 the smallest
    expected gradient stays where it is; Theorem 1 falls by 16, Theorem 2 by nearly 4."""
    found = noisy_gradients(4000, lr=0.1, tau=1e-2, **rule)
    assert found[3999] > 0.5 * found[249]
    assert found[249] < 0.1 * found[0]
    c = Known(L=1.0, G=3.0, local=1.0, spread=0.0, gap=4.5, d=1)
    one = [bounds.theorem1(c, T, 1, 1, 0.1) for T in (250, 4000)]
    two = [bounds.theorem2(c, T, 1, 1, 0.1, 1e-2) for T in (250, 4000)]
    assert one[0] / one[1] == pytest.approx(16)
    assert two[0] / two[1] > 2.5
    if rule["step_with"] == "m":  # at T = 4000 it lies above Theorem 1 already
        assert found[3999] > one[1]


def test_a_sum_goes_on_falling() -> None:
    """The 1/sqrt(T) of Theorem 2 belongs to the sum, whose steps shrink by themselves."""
    ema = noisy_gradients(4000, lr=1.0, tau=1e-2, step_with="g")
    total = noisy_gradients(4000, lr=1.0, tau=1e-2, step_with="g", accumulate="sum")
    assert total[3999] < 0.4 * total[249]
    assert total[3999] < 0.1 * ema[3999]


def test_divergence_of_a_quadratic_by_hand() -> None:
    """Full batches, FedAvg: w_k - w_0 = ((I - eta H)^k - I)(w_0 - centre)."""
    problem = Quadratic.make(d=3, clients=4, samples=5)
    algorithm, divergence = bounds.watch(prefed.FedAvg(client_lr=0.3))
    settings = {"rounds": 1, "local_steps": 6, "batch_size": None}
    simulation = problem.simulation(algorithm, **settings)
    simulation.run_round()
    shrink = torch.eye(3, dtype=torch.float64) - 0.3 * problem.H
    off = problem.start - problem.centres
    by_hand = []
    for k in range(1, 6):
        moved = off @ (torch.linalg.matrix_power(shrink, k) - torch.eye(3).double())
        by_hand.append(float(moved.square().sum(1).mean()))
    assert divergence.largest() == pytest.approx(max(by_hand))
    assert divergence.largest() == 0  # forgotten
    plain = problem.simulation(prefed.FedAvg(client_lr=0.3), **settings)
    plain.run_round()
    assert torch.equal(plain.server.weights, simulation.server.weights)


@pytest.mark.parametrize("name", ["prefed", "prefedopt"])
def test_watching_changes_no_bit(name: str) -> None:
    problem = Quadratic.make(d=3, clients=4, samples=5)
    plain = prefed.ALGORITHMS.get(name)(client_lr=0.01)
    watched, _ = bounds.watch(plain)
    runs = []
    for algorithm in (plain, watched):
        run = problem.simulation(algorithm, rounds=3, local_steps=4, batch_size=2)
        for _ in range(3):
            run.run_round()
        runs.append(run.server.weights)
    assert torch.equal(*runs)


def test_case_2_of_lemma_1_holds_on_a_quadratic() -> None:
    problem = Quadratic.make(d=5, clients=6, samples=20, condition=10)
    K = 8
    eta = bounds.admissible(1.0, K)
    algorithm, divergence = bounds.watch(prefed.PreFedOpt(client_lr=eta, server_lr=0.01))
    run = problem.simulation(algorithm, rounds=5, local_steps=K, batch_size=4)
    spread = (problem.centres - problem.optimum) @ problem.H
    local = float(problem.covariances(4).diagonal(dim1=1, dim2=2).sum(1).max())
    c = Known(1.0, 1.0, local, float(spread.square().sum(1).mean()), 1.0, 5)
    for _ in range(5):
        gradient = float(((run.server.weights - problem.optimum) @ problem.H).square().sum())
        run.run_round()
        gone = divergence.largest()
        assert 0 < gone < bounds.lemma1_prefedopt(c, K, gradient)
        assert gone < bounds.lemma1_corrected(c, K, eta, gradient)


def test_fit() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    slope = bounds.fit(x, [3 * v**-0.5 for v in x])
    assert slope.value == pytest.approx(-0.5)
    assert slope.high - slope.low < 1e-9
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        y = np.exp(-1.0 * np.log(x) + 0.2 * rng.normal(size=4))
        found = bounds.fit(x, list(y))
        hits += found.low <= -1 <= found.high
    assert 180 <= hits <= 199
