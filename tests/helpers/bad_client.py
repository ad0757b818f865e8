"""A run with a client whose samples are so large that its loss overflows."""

from __future__ import annotations

from typing import Any

import torch

import prefed
from tests.helpers.problems import tiny_data

BAD = 2
"""The client with samples so large that its loss overflows."""


def with_a_bad_client() -> prefed.FederatedData:
    data = tiny_data()
    clients = [data.client(c).all() for c in range(len(data))]
    x, y = clients[BAD]
    clients[BAD] = (x * 1e300, y)
    return prefed.FederatedData(clients)


def squares(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out**2).mean()


def model() -> torch.nn.Module:
    return torch.nn.Linear(5, 3).double()


def rounds(name: str, count: int, **options: Any) -> prefed.Simulation:
    settings = prefed.Settings(rounds=9, local_steps=2, batch_size=4, device="cpu", **options)
    torch.manual_seed(0)
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=0.01)
    simulation = prefed.Simulation(algorithm, model(), with_a_bad_client(), settings, squares)
    for _ in range(count):
        simulation.run_round()
    return simulation
