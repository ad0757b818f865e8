"""Drop-in strategies beside training loops and models of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefed
import prefed.flower
from prefed.core.errors import PrefedError, RunFailed
from tests.helpers.flower_apps import LR, OPTIONS, STEPS, flat, run, tiny_app, tiny_grid
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model


def simulated(algorithm: prefed.Algorithm, model: nn.Module | None = None) -> prefed.Result:
    return prefed.simulate(
        algorithm, model or tiny_model(), tiny_data(), rounds=4, local_steps=STEPS,
        batch_size=None, engine="sequential", weighting="samples", progress=False,
    )  # fmt: skip


@pytest.mark.parametrize(("options", "own"), [
    ({}, {}),
    ({"bias_correction": True}, {"bias_correction": True}),
    ({"bias_correction": True, "momentum": "reset"}, {"bias_correction": True}),
    ({"tau": 0.1, "beta2": 0.99}, {"tau": 0.1, "betas": (0.9, 0.99)}),
    ({"accumulate": "sum", "weight_decay": 0.1}, {"accumulate": "sum", "weight_decay": 0.1}),
], ids=str)  # fmt: skip
def test_a_loop_of_ones_own(options: Any, own: Any, tmp_path: Path) -> None:
    strategy = prefed.flower.PreFed(client_lr=LR, **options, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "covariance", **own), tmp_path))
    wanted = simulated(prefed.PreFed(client_lr=LR, **options)).weights
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "words"), [
    ({"P": "derived", "momentum": "derived"}, "needs local_train"),
    ({"shape": "kronecker"}, "needs local_train"),
    ({"shape": "full"}, "needs local_train"),
    ({"tau_relative": 0.1}, "needs local_train"),
    ({"clip_norm": 1.0}, "clip_norm: is carried out by local_train alone"),
    ({"decoupled_weight_decay": 0.1}, "decoupled_weight_decay: is carried out by"),
    ({"groups": [{"params": "@vectors", "lr_scale": 0.5}]}, "groups: is carried out by"),
    ({"tau": 0.1}, "tau: the optimiser has 0.001, and the strategy of the server 0.1"),
    ({"beta1": 0.5}, "betas: the optimiser has (0.9, 0.9)"),
    ({"bias_correction": True}, "bias_correction: the optimiser has False"),
], ids=str)  # fmt: skip
def test_what_a_loop_of_ones_own_does_not_do(options: Any, words: str, tmp_path: Path) -> None:
    strategy = prefed.flower.PreFed(client_lr=LR, retries=0, **options, **OPTIONS)
    with pytest.raises((PrefedError, RunFailed)) as raised:
        run(strategy, tiny_grid(tiny_app(arrays(), "covariance"), tmp_path), 1)
    assert words in str(raised.value)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(SIZES[0], SIZES[0]), nn.Linear(SIZES[0], SIZES[0])
        self.second.weight = self.first.weight
        self.last = nn.Linear(SIZES[0], SIZES[2])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Frozen(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(SIZES[0], SIZES[0]).double().requires_grad_(False)


@pytest.mark.parametrize("name", ["FedAvg", "PreFed", "FedPM", "AdaAlter"])
@pytest.mark.parametrize("make", [Tied, Frozen])
def test_tied_and_frozen_weights(make: type[Tied], name: str, tmp_path: Path) -> None:
    strategy = getattr(prefed.flower, name)(client_lr=LR, **OPTIONS)
    result = run(
        strategy, tiny_grid(tiny_app(arrays(), "local_train", make=make), tmp_path), make=make
    )
    found = result.arrays.to_torch_state_dict()
    wanted = simulated(getattr(prefed, name)(client_lr=LR), make()).model.state_dict()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [Tied, Frozen])
@pytest.mark.parametrize("privacy", [
    prefed.Privacy(noise_multiplier=1.0, clip=0.1, sampling="fixed", delta=1e-5),
    prefed.flower.CentralDP(noise_multiplier=1.0, clip_norm=0.1),
], ids=["Privacy", "CentralDP"])  # fmt: skip
def test_noise_is_for_what_is_trained(privacy: Any, make: type[Tied], tmp_path: Path) -> None:
    app = tiny_app(arrays(), "local_train", make=make)
    asked = {"retries": 0, "weighting": "uniform", "privacy": privacy, **OPTIONS}
    with pytest.raises((PrefedError, RunFailed), match=r"add noise to second\.weight"):
        run(prefed.flower.FedAvg(client_lr=LR, **asked), tiny_grid(app, tmp_path), 1, make)


def test_a_schedule_that_the_server_alone_needs(tmp_path: Path) -> None:
    rate = lambda round: 0.5 + round  # noqa: E731
    strategy = prefed.flower.PreFedOpt(client_lr=LR, server_lr=rate, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "local_train"), tmp_path))
    wanted = simulated(prefed.PreFedOpt(client_lr=LR, server_lr=rate)).weights
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)
