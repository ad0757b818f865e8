"""Drop-in strategies beside training loops and models of one's own."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

import prefed
import prefed.flower
from prefed.core.errors import PrefedError, RunFailed
from tests.helpers.flower_apps import LR, OPTIONS, STEPS, flat, run, tiny_app, tiny_grid
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model


def simulated(
    algorithm: prefed.Algorithm, model: nn.Module | None = None, **settings: Any
) -> prefed.Result:
    return prefed.simulate(
        algorithm, model or tiny_model(), tiny_data(), rounds=4, local_steps=STEPS,
        batch_size=None, engine="sequential", weighting="samples", progress=False, **settings,
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


def start(strategy: Any, make: Any, without: str, tmp_path: Path) -> dict[str, Tensor]:
    """The final arrays, of a run with some entries of the state dict left out."""
    grid = tiny_grid(tiny_app(arrays(), "local_train", make=make), tmp_path)
    first = {n: v for n, v in make().state_dict().items() if not re.fullmatch(without, n)}
    result = strategy.start(grid, ArrayRecord(first), 4, timeout=5)
    found: dict[str, Tensor] = result.arrays.to_torch_state_dict()
    assert found.keys() == first.keys()
    return found


JOINED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("PreFedOpt", {"tau_relative": 0.1}, {}, "PreFedOpt: with these options the server's step"),
    ("FedAvg", {}, {"mean": "geometric"}, "mean: the distances"),
    ("FedAvg", {}, {"mean": "clipped"}, "mean: the distances"),
    ("AdaAlter", {}, {"state_mean": "geometric"}, "state_mean: the distances"),
]


@pytest.mark.parametrize(("name", "options", "asked", "words"), JOINED, ids=str)
@pytest.mark.parametrize(
    ("make", "without"),
    [(Tied, r"second\.weight"), (Frozen, r"second\..*")],
    ids=["tied", "frozen"],
)
def test_what_is_worked_out_of_all_weights_together(
    make: type[Tied], without: str, name: str, options: Any, asked: Any, words: str, tmp_path: Path
) -> None:
    """Frozen parameters count nothing in distances, and so may be there."""
    strategy = partial(
        getattr(prefed.flower, name), client_lr=LR, retries=0, **OPTIONS, **options, **asked
    )
    if make is Tied or not asked:
        with pytest.raises(RunFailed, match=rf"{words} (?s:.*)second\.weight.* leave"):
            start(strategy(), make, "", tmp_path / "whole")
        found = start(strategy(), make, without, tmp_path)
    else:
        found = start(strategy(), make, "", tmp_path)
    wanted = simulated(getattr(prefed, name)(client_lr=LR, **options), make(), **asked).model
    for key, value in found.items():
        torch.testing.assert_close(value, wanted.state_dict()[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["FedAvg", "PreFed", "FedAdamW", "FedMuon", "SCAFFOLD"])
@pytest.mark.parametrize(
    ("make", "without"),
    [(Tied, r"second\.weight"), (Frozen, r"second\..*")],
    ids=["tied", "frozen"],
)
def test_what_nobody_trains_may_be_left_out(
    make: type[Tied], without: str, name: str, tmp_path: Path
) -> None:
    strategy = getattr(prefed.flower, name)(client_lr=LR, **OPTIONS)
    found = start(strategy, make, without, tmp_path)
    wanted = simulated(getattr(prefed, name)(client_lr=LR), make()).model.state_dict()
    for key, value in found.items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-12)


class Kept(nn.Sequential):
    """With a buffer that training leaves as it is, and some that it changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(SIZES[0], 4), nn.BatchNorm1d(4), nn.Linear(4, SIZES[2])
        super().__init__(*layers)
        self.register_buffer("table", torch.ones(3))
        self.double()


@pytest.mark.parametrize(("without", "words"), [
    (r"2\.bias", r"they lack 2\.bias, which training changes; send arrays under"),
    (r"1\.running_mean", r"they lack 1\.running_mean, which"),
    (r"1\.num_batches_tracked", r"they lack 1\.num_batches_tracked, which"),
])  # fmt: skip
def test_what_is_trained_may_not_be_left_out(without: str, words: str, tmp_path: Path) -> None:
    strategy = prefed.flower.FedAvg(client_lr=LR, retries=0, **OPTIONS)
    with pytest.raises(RunFailed, match=words):
        start(strategy, Kept, without, tmp_path)


def test_a_buffer_that_stays_may_be_left_out(tmp_path: Path) -> None:
    strategies = [prefed.flower.FedAvg(client_lr=LR, **OPTIONS) for _ in range(2)]
    one, other = (
        start(s, Kept, w, tmp_path) for s, w in zip(strategies, ("table", ""), strict=True)
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_arrays_of_another_model(tmp_path: Path) -> None:
    grid = tiny_grid(tiny_app(arrays(), "local_train"), tmp_path)
    first = {f"model.{n}": v for n, v in tiny_model().state_dict().items()}
    strategy = prefed.flower.FedAvg(retries=0, **OPTIONS)
    with pytest.raises(RunFailed, match=r"the model has no 'model\.0\.weight'; send arrays under"):
        strategy.start(grid, ArrayRecord(first), 1, timeout=5)


def test_a_schedule_that_the_server_alone_needs(tmp_path: Path) -> None:
    rate = lambda round: 0.5 + round  # noqa: E731
    strategy = prefed.flower.PreFedOpt(client_lr=LR, server_lr=rate, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "local_train"), tmp_path))
    wanted = simulated(prefed.PreFedOpt(client_lr=LR, server_lr=rate)).weights
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)
