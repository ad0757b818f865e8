"""Measured constants on problems where they are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import prefed
from prefed.experiments.config import load
from prefed.theory import constants
from prefed.theory.constants import Constants, Estimate, measure
from prefed.theory.objective import Objective
from prefed.theory.quadratic import Quadratic

BATCH = 5


def measured(problem: Quadratic, **settings: Any) -> Constants:
    chosen = {"rounds": 1, "local_steps": 1, "batch_size": BATCH, **settings}
    simulation = problem.simulation(prefed.FedAvg(), **chosen)
    return measure(Objective.of(simulation))[0]


def inside(estimate: Estimate, truth: float) -> bool:
    slack = 1e-9 * abs(truth)
    return estimate.low - slack <= truth <= estimate.high + slack


@pytest.mark.parametrize("condition", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("seed", range(3))
def test_quadratic(condition: float, seed: int) -> None:
    problem = Quadratic.make(d=12, clients=8, samples=40, condition=condition, seed=seed)
    found = measured(problem, seed=seed)
    assert inside(found.L, 1.0)
    assert found.L.high < 1.6 * found.L.value  # an interval that says something
    gap = float(problem.excess(problem.start))
    assert inside(found.gap, gap)
    assert math.isclose(found.gap.value, gap, rel_tol=1e-6)
    spread = (problem.centres - problem.optimum) @ problem.H
    assert math.isclose(found.spread.value, float(spread.square().sum(1).mean()), rel_tol=1e-9)
    torch.testing.assert_close(found.spread_coordinates, spread.square().mean(0))
    traces = problem.covariances(BATCH).diagonal(dim1=1, dim2=2)
    assert inside(found.local_largest, float(traces.sum(1).max()))
    largest = ((problem.start - problem.centres) @ problem.H).abs().max()
    assert found.G.value >= float(largest) - 1e-12


@pytest.mark.long
def test_intervals_of_the_local_variance_cover_as_often_as_they_say() -> None:
    """60 independent problems: 95 % should cover; fewer than 50 would happen once in 10,000."""
    hits = 0
    for seed in range(60):
        problem = Quadratic.make(d=4, clients=5, samples=30, seed=seed)
        objective = Objective.of(
            problem.simulation(
                prefed.FedAvg(), rounds=1, local_steps=1, batch_size=BATCH, seed=seed
            )
        )
        clients = list(range(5))
        gradients = objective.gradients(problem.start, clients)
        found, _, _ = constants.variance_within(objective, clients, problem.start, gradients, 0)
        truth = problem.covariances(BATCH).diagonal(dim1=1, dim2=2).sum(1).mean()
        hits += inside(found, float(truth))
    assert 50 <= hits <= 60


def test_curvature_interval_holds_where_eigenvalues_are_close() -> None:
    """Power iteration is slowest there; the bound from above must still hold."""
    problem = Quadratic.make(d=60, clients=3, samples=5, condition=1.2)
    objective = Objective.of(problem.simulation(prefed.FedAvg(), rounds=1, local_steps=1))
    for draw in range(20):
        found = constants.measure_curvature(objective, problem.start, 0, draw, 0.05)
        assert inside(found, 1.0)


def test_hessian_of_a_network_is_that_of_autograd() -> None:
    from tests.helpers.problems import tiny_data, tiny_model

    settings = prefed.Settings(rounds=1, local_steps=1, device="cpu")
    simulation = prefed.Simulation(prefed.FedAvg(), tiny_model(), tiny_data(), settings)
    objective = Objective.of(simulation)
    x, y = simulation.data.client(1).all()
    layout = objective.flat.layout

    def loss(w: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(objective.flat.module, layout.views(w), (x,))
        return torch.nn.functional.cross_entropy(output, y)

    H = torch.autograd.functional.hessian(loss, objective.start)
    with objective.hessian(objective.start, 1) as product:
        ours = torch.stack([product(row) for row in torch.eye(objective.d).double()])
    torch.testing.assert_close(ours, H, rtol=1e-9, atol=1e-11)
    top = float(torch.linalg.eigvalsh(H).abs().max())
    found = constants.measure_curvature(objective, objective.start, 1, 0, 0.05)
    assert found.low - 1e-9 <= top <= found.high


def test_full_batches_have_no_local_variance() -> None:
    found = measured(Quadratic.make(d=4, clients=3, samples=6), batch_size=None)
    assert found.local.value == found.local.high == 0


@pytest.mark.long
def test_drawn_clients_give_an_interval_of_the_global_variance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "CLIENTS", 12)
    assert measured(Quadratic.make(d=4, clients=40, samples=5)).clients == 12
    hits = 0
    for seed in range(60):
        problem = Quadratic.make(d=4, clients=60, samples=5, seed=seed)
        run = problem.simulation(prefed.FedAvg(), rounds=1, local_steps=1, seed=seed)
        objective = Objective.of(run)
        clients = objective.some_clients(20)
        gradients = objective.gradients(problem.start, clients)
        found, _ = constants.variance_between(objective, clients, gradients)
        spread = (problem.centres - problem.optimum) @ problem.H
        hits += inside(found, float(spread.square().sum(1).mean()))
    assert 50 <= hits <= 60


def test_a_small_digits_config() -> None:
    config = load(
        "digits-noniid", ["model.hidden=[4]", "data.split.clients=5", "clients_per_round=5"]
    )
    found, best = measure(Objective.of(config.make_run()))
    assert found.gap.high > found.gap.value > 1
    assert found.local.low > 0
    assert found.local.value <= found.local_largest.value
    assert len(best) == len(found.local_coordinates) == 310
    assert math.isclose(float(found.local_coordinates.sum()), found.local.value, rel_tol=1e-4)
