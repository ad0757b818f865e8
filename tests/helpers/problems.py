"""Small problems that tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import prefed
from prefed.training.local_trainer import LocalTrainer

SIZES = (5, 4, 3)
"""Inputs, hidden units, classes."""
CLIENT_SIZES = (7, 12, 4, 9, 15, 6)

WITHOUT_NORMS = [name for name in prefed.ALGORITHMS.names() if name != "fedbn"]
"""The algorithms that train models without normalisation layers."""

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def arrays(seed: int = 0) -> list[Pair]:
    """Clients of unequal size, each with its own distribution."""
    rng = np.random.default_rng(seed)
    clients = []
    for size in CLIENT_SIZES:
        x = rng.normal(rng.normal(size=SIZES[0]), 1.0, (size, SIZES[0]))
        clients.append((x, rng.integers(0, SIZES[2], size)))
    return clients


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    inputs, hidden, classes = SIZES
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))
    return layers.to(dtype)


def local(run: prefed.Run) -> LocalTrainer:
    """The trainer of a run in this process, prepared."""
    run.prepare()
    assert isinstance(run.trainer, LocalTrainer)
    return run.trainer


def tiny_data(dtype: torch.dtype = torch.float64) -> prefed.FederatedData:
    clients = [(torch.tensor(x, dtype=dtype), torch.tensor(y)) for x, y in arrays()]
    return prefed.FederatedData(clients, test=clients[0])
