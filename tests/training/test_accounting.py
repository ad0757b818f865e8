"""What rounds cost: as dp-accounting says, as others have published, and as a formula gives it."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, stats

import prefed
from prefed.training.accounting import Accountant

ONE, REPLACE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_ONE


def poisson(q: float, z: float) -> Any:
    return dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))


def without(n: int, m: int, z: float) -> Any:
    return dp.SampledWithoutReplacementDpEvent(n, m, dp.GaussianDpEvent(z))


SETTINGS: list[tuple[dict[str, Any], int, int, int, float, Any]] = [
    # privacy, clients, cohort, rounds, delta, what the library is to be told
    ({"noise_multiplier": 1.0}, 1000, 100, 50, 1e-5, (RdpAccountant(), poisson(0.1, 1.0))),
    ({"noise_multiplier": 0.6}, 500, 10, 200, 1e-4, (RdpAccountant(), poisson(0.02, 0.6))),
    ({"noise_multiplier": 4.0}, 10, 10, 30, 1e-6, (RdpAccountant(), poisson(1.0, 4.0))),
    (
        {"noise_multiplier": 1.1, "accountant": "pld"},
        1000, 50, 20, 1e-5, (PLDAccountant(), poisson(0.05, 1.1)),
    ),
    (
        {"noise_multiplier": 2.0, "accountant": "pld", "neighbours": "replace"},
        400, 40, 20, 1e-5, (PLDAccountant(REPLACE), poisson(0.1, 2.0)),
    ),
    (
        {"noise_multiplier": 5.0, "sampling": "fixed"},
        100, 10, 20, 1e-5, (RdpAccountant(), dp.GaussianDpEvent(5.0)),
    ),
    (
        {"noise_multiplier": 5.0, "sampling": "fixed", "accountant": "pld"},
        100, 10, 4, 1e-5, (PLDAccountant(), dp.GaussianDpEvent(5.0)),
    ),
    (  # a client in another's place moves the sum by twice the clip
        {"noise_multiplier": 3.0, "sampling": "fixed", "neighbours": "replace"},
        1000, 100, 40, 1e-5, (RdpAccountant(neighboring_relation=REPLACE), without(1000, 100, 1.5)),
    ),
    (
        {"noise_multiplier": 8.0, "sampling": "fixed", "neighbours": "replace"}
        | {"accountant": "pld"},
        1000, 100, 3, 1e-5, (PLDAccountant(), dp.GaussianDpEvent(4.0)),
    ),
    (
        {"noise_multiplier": 12.0, "where": "client"},
        1000, 100, 9, 1e-5, (RdpAccountant(), dp.GaussianDpEvent(6.0)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_epsilon_is_that_of_dp_accounting(case: int) -> None:
    options, clients, cohort, rounds, delta, (library, event) = SETTINGS[case]
    privacy = prefed.Privacy(delta=delta, **options)
    ours = Accountant.of(privacy, clients, cohort)
    assert privacy.noise_multiplier is not None
    found = ours.epsilon(privacy.noise_multiplier, rounds)
    theirs = library.compose(event, rounds).get_epsilon(delta)
    assert found == pytest.approx(theirs, abs=1e-6)
    assert 0 < found < ours.epsilon(privacy.noise_multiplier, rounds + 1)
    assert ours.epsilon(privacy.noise_multiplier, 0) == 0


PUBLISHED = [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10), (0.7, 70, 8.68)]
"""MNIST with batches of 256 and delta = 1e-5: noise multiplier, epochs, epsilon. The first three
are the table of TensorFlow Privacy's tutorials, the last Bu et al. 2020, figure 4."""


@pytest.mark.parametrize(("noise", "epochs", "published"), PUBLISHED)
def test_epsilon_that_others_have_published(noise: float, epochs: int, published: float) -> None:
    """They turn Renyi divergences into epsilon as Mironov 2017 does. Today's way is tighter, and
    privacy loss distributions are tighter still."""
    ours = Accountant("rdp", "poisson", "add-remove", 1e-5, 60_000, 256)
    steps = round(epochs * 60_000 / 256)
    counted = ours.fresh().compose(ours.event(noise), steps)
    orders = np.array(counted.orders)
    mironov = float(np.min(counted.rdp + math.log(1e5) / (orders - 1)))
    assert mironov == pytest.approx(published, abs=0.005)
    assert 0.75 * published < ours.epsilon(noise, steps) < published
    if epochs == 15:
        tight = Accountant("pld", "poisson", "add-remove", 1e-5, 60_000, 256)
        assert 0.8 < tight.epsilon(noise, steps) / ours.epsilon(noise, steps) < 1


@pytest.mark.parametrize("neighbours", ["add-remove", "replace"])
def test_epsilon_of_a_gaussian_by_formula(neighbours: str) -> None:
    """Balle and Wang 2018: what four releases of a Gaussian cost exactly."""
    sensitivity = 2 if neighbours == "replace" else 1
    mu = sensitivity * math.sqrt(4) / 6.0

    def excess(epsilon: float) -> float:
        a, b = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
        return float(a - math.exp(epsilon) * b) - 1e-5

    exact = optimize.brentq(excess, 1e-3, 50)
    found = Accountant("pld", "fixed", neighbours, 1e-5, 100, 10).epsilon(6.0, 4)
    assert exact <= found < exact + 1e-3
    above = Accountant("rdp", "none", neighbours, 1e-5, 100, 10).epsilon(6.0, 4)
    assert exact < above < 1.2 * exact


def test_noise_for_a_budget_spends_it_and_no_more() -> None:
    ours = Accountant("rdp", "poisson", "add-remove", 1e-5, 1000, 100)
    noise = ours.noise_for(2.0, 30)
    assert 1.999 < ours.epsilon(noise, 30) <= 2.0


def test_the_count_of_an_adaptive_clip_is_paid_for() -> None:
    """The sum and the count, as two Gaussians that the library composes, cost what the stated
    noise multiplier does (Andrew et al. 2021, theorem 1)."""
    from tests.training.test_privacy import make, mechanism

    privacy = prefed.Privacy(noise_multiplier=1.3, clip={"count_noise": 0.9})
    mine = mechanism(make(prefed.FedAvg(), privacy))
    count = mine.count_noise / 0.5  # a client moves it by a half at most
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(mine.noise), dp.GaussianDpEvent(count)])
    library = RdpAccountant().compose(dp.PoissonSampledDpEvent(0.3, both), 10)
    one = RdpAccountant().compose(poisson(0.3, 1.3), 10)
    assert library.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
    shares = prefed.Privacy(noise_multiplier=1.3, state_clip={"m": 0.1, "P": 0.2}, state_share=0.3)
    mine = mechanism(make(prefed.PreFed(), shares))
    parts = [mine.deviation(name) / mine.bound(name) for name in ("weights", "m", "P")]
    all_three = dp.ComposedDpEvent([dp.GaussianDpEvent(part) for part in parts])
    library = RdpAccountant().compose(dp.PoissonSampledDpEvent(0.3, all_three), 10)
    assert library.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
