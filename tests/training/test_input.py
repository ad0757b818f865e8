"""Bad input is refused before training starts, by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.data import DATASETS
from tests.helpers.problems import tiny_data, tiny_model

GOOD: dict[str, Any] = {"rounds": 1, "local_steps": 1, "batch_size": None, "device": "cpu"}


def clients(change: Callable[[list[Any]], Any]) -> prefed.FederatedData:
    data = tiny_data()
    pairs: list[Any] = [data.client(c).all() for c in range(len(data))]
    change(pairs)
    return prefed.FederatedData(pairs, test=pairs[0])


def with_nan(pairs: list[Any]) -> None:
    x, y = pairs[2]
    pairs[2] = (x.clone().index_fill_(0, torch.tensor([1]), float("nan")), y)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "empty client": (
        lambda: run(data=clients(lambda p: p.append((p[0][0][:0], p[0][1][:0])))),
        r"clients\[6\]: it has no samples",
    ),
    "label out of range": (
        lambda: run(data=clients(lambda p: p.append((p[0][0], p[0][1] + 9)))),
        r"clients\[6\]: labels reach from 9 to \d+, but the model has outputs for labels 0 to 2",
    ),
    "NaN in data": (
        lambda: run(data=clients(with_nan)),
        r"clients\[2\]: x has values .*not finite",
    ),
    "unequal x and y": (
        lambda: run(data=clients(lambda p: p.append((p[0][0], p[0][1][:-1])))),
        r"clients\[6\]: x and y should have the same number",
    ),
    "no clients": (lambda: prefed.FederatedData([]), r"clients: there is none"),
    "not a pair": (lambda: run(data=prefed.FederatedData([3])), r"clients\[0\]: should be a pair"),
    "model without parameters": (lambda: run(model=nn.ReLU()), "model: it has no trainable"),
    "not a model": (lambda: run(model=3), "model: should be a torch.nn.Module"),
    "too many clients per round": (
        lambda: run(clients_per_round=7),
        "clients_per_round: 7 is more than the 6 clients",
    ),
    "negative step size": (lambda: prefed.PreFed(client_lr=-0.1), "client_lr: should be greater"),
    "negative server step": (lambda: prefed.FedAdam(server_lr=-1), "server_lr: should be greater"),
    "zero steps": (lambda: run(local_steps=0), "local_steps: should be greater than 0"),
    "zero rounds": (lambda: run(rounds=0), "rounds: should be greater than 0"),
    "zero batch": (lambda: run(batch_size=0), "batch_size: should be greater than 0"),
    "negative seed": (lambda: run(seed=-1), "seed: should be greater than or equal to 0"),
    "weighting": (lambda: run(weighting="sample"), "weighting: should be 'uniform' or 'samples'"),
    "weights": (lambda: run(weighting=[1, 2]), "weighting: has 2 weights, but there are 6 clients"),
    "a weight": (lambda: run(weighting=[1, 0]), "weighting.1: should be greater than 0, not 0"),
    "a rate below 0": (
        lambda: run(algorithm=prefed.FedAvg(client_lr=lambda t: -0.1)),
        "schedule: gives -0.1 in round 0; it should give 0 or more",
    ),
    "no rate": (
        lambda: run(algorithm=prefed.FedAvg(client_lr=print)),
        "schedule: gives None in round 0; it should give 0 or more",
    ),
    "a function that is not there": (
        lambda: prefed.FedAvg(client_lr="prefed.core.schedule:stairs"),
        "FedAvg.client_lr: schedule 'prefed.core.schedule:stairs': prefed.core.schedule has no",
    ),
    "engine": (lambda: run(engine="sequentiel"), "unknown engine .*sequential"),
    "device": (lambda: run(device="cuda:7"), "device: 'cuda:7' cannot be used here"),
    "model of another dtype": (
        lambda: run(model=tiny_model(dtype=torch.float32)),
        "clients, model: mixed dtypes",
    ),
    "mixed dtypes in the model": (
        lambda: run(model=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).double())),
        "model: all trainable parameters must share one",
    ),
    "mixed dtypes of clients": (
        lambda: run(data=clients(lambda p: p.append((p[0][0].float(), p[0][1])))),
        "clients, test: .*same dtypes",
    ),
    "model that does not fit": (lambda: run(model=nn.Linear(9, 3).double()), "model, loss: they"),
    "loss that is no number": (lambda: run(loss=lambda out, y: out), "loss: should return one"),
    "not an algorithm": (lambda: run(algorithm="prefed"), "algorithm: should be an Algorithm"),
    "full matrix too large": (
        lambda: run(
            algorithm=prefed.PreFed(shape="full"),
            model=nn.Sequential(nn.Linear(5, 900), nn.Linear(900, 3)).double(),
        ),
        'shape: "full" holds a',
    ),
}


def run(**changes: Any) -> Any:
    arguments = {
        "algorithm": prefed.FedAvg(),
        "model": tiny_model(),
        "data": tiny_data(),
        **GOOD,
        **changes,
    }
    return prefed.simulate(**arguments)


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(prefed.PrefedError, match=message):
        call()


def test_good_input_is_left_alone() -> None:
    model, data = tiny_model(), tiny_data()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.random.get_rng_state()
    result = prefed.simulate(prefed.FedAvg(client_lr=0.5), model, data, **GOOD)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    flat = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
    assert torch.equal(flat, result.weights)


def test_clients_made_on_demand() -> None:
    """Anything with len() will do, and only the cohort is asked for."""
    asked = set()

    class Lazy:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
            asked.add(client)
            return torch.full((3, 5), client / 1e6).double(), torch.tensor([0, 1, 2])

    data = prefed.FederatedData(Lazy())
    result = prefed.simulate(
        prefed.SCAFFOLD(), tiny_model(), data, clients_per_round=3, **{**GOOD, "rounds": 2}
    )
    cohorts = {c for record in result.history for c in record["cohort"]}
    assert asked == cohorts | {0}
    assert set(result.kept) == cohorts
    assert result.history[-1]["test_accuracy"] is None


def test_divergence_keeps_the_state_before_it() -> None:
    data, model = tiny_data(), tiny_model()
    settings = prefed.Settings(rounds=9, local_steps=2, batch_size=None, device="cpu")
    algorithm = prefed.FedAvg(client_lr=prefed.schedule.warmup(1e200, rounds=3))
    simulation = prefed.Simulation(
        algorithm, model, data, settings, loss=lambda out, y: (out**2).mean()
    )
    with pytest.raises(prefed.Diverged, match=r"round \d: .*Lower client_lr") as caught:
        for _ in range(9):
            simulation.run_round()
    assert torch.isfinite(simulation.server.weights).all()
    assert simulation.server.round == len(caught.value.history) - 1


def test_the_median_step_is_that_of_a_corrected_preconditioner() -> None:
    """lr / (sqrt(P) + tau) as clients divide by it, from the first round on."""
    data, lr = tiny_data(), 0.01
    run = prefed.Run(
        prefed.PreFedM(client_lr=lr), tiny_model(), data, prefed.Settings(rounds=1, local_steps=3)
    )
    record = run.run_round()
    P = run.server.shared["P"] / run.server.shared["P_mass"]
    root = P.sqrt() + 0.1 * P.mean().sqrt()
    assert record["median_step"] == pytest.approx(lr / float(root.median()), rel=1e-6)


def test_a_collapsed_server_rule_is_reported() -> None:
    dataset = DATASETS.get("digits")()
    clients = [(dataset.x[i::5].float().flatten(1), dataset.y[i::5]) for i in range(5)]
    data = prefed.FederatedData(clients)
    with pytest.warns(prefed.CollapseWarning, match=r"Lower tau \(now 10.0\) or set per_step"):
        result = prefed.simulate(
            prefed.PreFedOpt(tau=10.0),
            nn.Linear(64, 10),
            data,
            rounds=6,
            local_steps=2,
            device="cpu",
        )
    assert result.history[-1]["adaptive_share"] == 0
    assert result.history[-1]["median_step"] == pytest.approx(0.002 / 10, rel=1e-3)
