"""Clients that are made on demand are made once a round, whatever the engine asks of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import prefed
from tests.helpers.problems import tiny_data, tiny_model

CASES: dict[str, tuple[prefed.Algorithm, dict[str, Any]]] = {
    "plain": (prefed.FedAvg(client_lr=0.1), {"local_steps": 2}),
    "by samples": (prefed.FedAvg(client_lr=0.1), {"local_steps": 2, "weighting": "samples"}),
    "epochs": (prefed.FedNova(client_lr=0.1), {"local_epochs": 2, "weighting": "samples"}),
    "full batches": (prefed.FedAvg(client_lr=0.1), {"local_steps": 2, "batch_size": None}),
    "other gradients": (prefed.MimeLite(client_lr=0.1), {"local_steps": 2}),
    "in lockstep": (prefed.PreFedSync(client_lr=0.1), {"local_steps": 2, "weighting": "samples"}),
    "devices": (prefed.FedAvg(client_lr=0.1), {"local_epochs": 1, "devices": "phone"}),
}


class Counted:
    """Clients that count how often each is made."""

    def __init__(self) -> None:
        self.data, self.made = tiny_data(), Counter[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, client: int) -> Any:
        self.made[client] += 1
        return self.data.client(client).all()


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", CASES)
def test_once_a_round(name: str, engine: str) -> None:
    algorithm, options = CASES[name]
    clients = Counted()
    settings = {"rounds": 4, "batch_size": 3, "device": "cpu", "engine": engine} | options
    run = prefed.Run(
        algorithm, tiny_model(), prefed.FederatedData(clients), prefed.Settings(**settings)
    )
    run.run_round()  # a clock, or steps that go by samples, may have to know how many there are
    for record in run.rounds(4):
        clients.made, made = Counter(), clients.made
        assert len(made) == len(clients)
        assert record["cohort"] == [*range(len(clients))]
    assert {*made.values()} == {1}


def test_those_that_are_tested_too() -> None:
    clients, tests = Counted(), Counted()
    data = prefed.FederatedData(clients, client_tests=tests)
    settings = prefed.Settings(rounds=3, local_steps=1, batch_size=3, device="cpu")
    run = prefed.Run(prefed.FedAvg(client_lr=0.1), tiny_model(), data, settings)
    run.run_round()
    tests.made.clear()
    run.run_round()
    assert {*tests.made.values()} == {1}
