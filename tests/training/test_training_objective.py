"""What is minimised, and the distance to its minimum, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefed
from prefed.core.errors import Interrupted, PrefedError
from tests.helpers.problems import tiny_data, tiny_model

DECAY = 0.01
SIZES = (30, 50, 20)
rng = np.random.default_rng(0)
INPUTS = [rng.normal(size=(n, 6)).astype(np.float32).astype(np.float64) for n in SIZES]
"""Numbers that float32 has as well."""
CLIENTS = [(x, rng.integers(0, 2, len(x))) for x in INPUTS]


def logistic(dtype: torch.dtype = torch.float64, **options: Any) -> prefed.Result:
    pairs = [(torch.tensor(x, dtype=dtype), torch.tensor(y)) for x, y in CLIENTS]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(6, 1).to(dtype)
    settings = {"rounds": 30, "local_steps": 3, "batch_size": None, "weighting": "samples"}
    return prefed.simulate(
        prefed.FedAvg(client_lr=0.5, weight_decay=DECAY), model, prefed.FederatedData(pairs),
        loss="bce", device="cpu", **settings | options,
    )  # fmt: skip


def objective(w: Any, weights: tuple[int, ...] = SIZES) -> float:
    """Of weights and bias, in NumPy."""
    total = 0.0
    for (x, y), weight in zip(CLIENTS, weights, strict=True):
        z = x @ w[:6] + w[6]
        total += weight * float(np.mean(np.logaddexp(0, z) - y * z))
    return total / sum(weights) + DECAY / 2 * float(w @ w)


def lowest() -> float:
    """By gradient descent with a step of 1/L, until nothing changes."""
    X = np.concatenate([np.c_[x, np.ones(len(x))] for x, _ in CLIENTS])
    y, w = np.concatenate([y for _, y in CLIENTS]), np.zeros(7)
    step = 1 / (np.linalg.eigvalsh(X.T @ X / len(X) / 4)[-1] + DECAY)
    for _ in range(20_000):
        w -= step * (X.T @ (1 / (1 + np.exp(-X @ w)) - y) / len(X) + DECAY * w)
    return objective(w)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_objective_is_that_of_all_clients(weighting: str) -> None:
    result = logistic(objective="value", weighting=weighting, evaluate_every=7)
    weights = SIZES if weighting == "samples" else (1, 1, 1)
    w = result.weights.numpy()
    assert result.history[-1]["objective"] == pytest.approx(objective(w, weights), rel=1e-12)
    measured = [r["round"] for r in result.history if "objective" in r]
    assert measured == [7, 14, 21, 28, 30]
    assert "objective_gap" not in result.history[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gap_is_the_distance_to_the_minimum(dtype: torch.dtype) -> None:
    history = logistic(dtype, objective="gap", local_steps=1, rounds=400).history
    least = lowest()
    for record in history:
        gap = record["objective"] - least
        assert record["objective_gap"] == pytest.approx(gap, rel=1e-6, abs=1e-14)
    assert history[0]["objective_gap"] > 1e-3
    assert -1e-15 < history[-1]["objective_gap"] < 1e-13


def test_softmax_and_a_resumed_run(tmp_path: Any) -> None:
    """The same with two outputs; and after a stop."""

    data = tiny_data()

    class Stop(prefed.Callback):
        def on_round(self, record: Any) -> None:
            self.run.stop()

    torch.manual_seed(1)
    model = nn.Linear(5, 3).double()
    whole, again = (tmp_path / name for name in ("whole", "again"))
    how: dict[str, Any] = {"rounds": 4, "local_steps": 2, "objective": "gap"}
    algorithm = prefed.FedAvg(client_lr=0.3, weight_decay=DECAY)
    one = prefed.simulate(algorithm, model, data, out=whole, **how)
    with pytest.raises(Interrupted, match="stopped after round 1"):
        prefed.simulate(algorithm, model, data, out=again, callbacks=[Stop()], **how)
    two = prefed.simulate(algorithm, model, data, out=again, resume=True, **how)
    assert [r["objective_gap"] for r in one.history] == [r["objective_gap"] for r in two.history]
    assert 0 < one.history[-1]["objective_gap"] < one.history[0]["objective_gap"]


@pytest.mark.parametrize(
    ("options", "settings", "text"),
    [
        ({}, {}, "finds no minimum"),
        ({"personal": ("@last",)}, {}, "leave out personal"),
        ({}, {"privacy": {"epsilon": 4.0}}, "without noise"),
    ],
)
def test_where_it_cannot_be_had(options: Any, settings: Any, text: str) -> None:
    how = {"rounds": 1, "local_steps": 1, "objective": "gap"}
    with pytest.raises(PrefedError, match=text):
        algorithm = prefed.FedAvg(client_lr=0.1, **options)
        prefed.simulate(algorithm, tiny_model(), tiny_data(), **how | settings)


def test_many_weights_have_a_value_only() -> None:
    data = prefed.FederatedData([(torch.randn(4, 50), torch.tensor([0, 1, 2, 3]))])
    how: dict[str, Any] = {"rounds": 1, "local_steps": 1, "device": "cpu"}
    algorithm, model = prefed.FedAvg(client_lr=0.1), nn.Linear(50, 50)
    with pytest.raises(PrefedError, match="up to 2000 weights, and there are 2550"):
        prefed.simulate(algorithm, model, data, objective="gap", **how)
    assert (
        "objective" in prefed.simulate(algorithm, model, data, objective="value", **how).history[0]
    )


def test_what_is_given_away_does_not_change_the_run() -> None:
    """The objective is measured in float64, on a model that shares its frozen weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    pairs = [(torch.randn(12, 5), torch.randint(2, (12,))) for _ in range(3)]
    settings = prefed.Settings(rounds=2, local_steps=2, objective="value", device="cpu")
    algorithm = prefed.FedAvg(client_lr=0.1, freeze=("0.*",))
    run = prefed.Run(algorithm, model, prefed.FederatedData(pairs), settings)
    for record in run.rounds():
        assert np.isfinite(record["objective"])
        assert {p.dtype for p in run.model().double().parameters()} == {torch.float64}
    assert {p.dtype for p in run.result().model.parameters()} == {torch.float32}
