"""One run in any engine, models for it, and how two runs are compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import prefed
from tests.helpers.device import DEVICE
from tests.helpers.problems import SIZES, tiny_data

RATES = {
    "prefedsync": 0.02,
    "adaalter": 0.01,
    "prefed": 0.005,
    "prefedlite": 0.005,
    "prefedm": 0.005,
    "prefedmlite": 0.005,
    "prefeds": 0.02,
    "prefedslite": 0.02,
    "prefedc": 0.02,
    "prefedclite": 0.02,
    "localadam": 0.005,
    "fedmuon": 0.02,
    "fedpac": 0.005,
}


def chain(dtype: torch.dtype = torch.float64, drop: float = 0.3) -> nn.Module:
    """A chain of linear layers, which the vectorised engine runs as batched products."""
    inputs, hidden, classes = SIZES
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Dropout(drop))
    return nn.Sequential(first, nn.Linear(hidden, 4), nn.ReLU(), nn.Linear(4, classes)).to(dtype)


class Net(nn.Module):
    """A model of the user's own, which runs under vmap: convolution, norm, functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(1, 4, (1, 3), padding=(0, 1))
        self.norm = nn.GroupNorm(2, 4)
        self.drop = nn.Dropout2d(0.2)
        self.head = nn.Linear(4 * SIZES[0], SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.conv(x[:, None, None]).relu()))
        out: Tensor = self.head(nn.functional.dropout(h.flatten(1), 0.4, self.training))
        return out


def batchnorm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(SIZES[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, SIZES[2])
    ).double()


def run(name: str, model: nn.Module, engine: str, **options: Any) -> prefed.Result:
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=RATES.get(name, 0.05))
    settings: dict[str, Any] = {"rounds": 10, "local_steps": 3, "batch_size": 4, "seed": 5}
    settings |= {"device": DEVICE, "clients_per_round": 4}
    dtype = next(model.parameters()).dtype
    data = options.pop("data", None) or tiny_data(dtype)
    return prefed.simulate(algorithm, model, data, engine=engine, **settings | options)


def same(a: prefed.Result, b: prefed.Result, tolerance: float) -> None:
    assert [r["cohort"] for r in a.history] == [r["cohort"] for r in b.history]
    torch.testing.assert_close(a.weights, b.weights, rtol=0, atol=tolerance)
    torch.testing.assert_close(a.server.buffers, b.server.buffers, rtol=0, atol=tolerance)
    assert a.kept.keys() == b.kept.keys()
    for client, state in a.kept.items():
        for field, value in state.items():
            torch.testing.assert_close(value, b.kept[client][field], rtol=0, atol=tolerance)
    for x, y in zip(a.history, b.history, strict=True):
        assert x["bytes_up"] == y["bytes_up"]
        for key in ("train_loss", "test_loss"):
            assert math.isclose(x[key], y[key], abs_tol=tolerance)
