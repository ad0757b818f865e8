"""Dropout with keys where a model calls it in unusual ways: in place, or once more in the backward
pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prefed
from prefed.training.keyed_dropout import KeyedDropout, keys
from tests.helpers.engine_runs import same
from tests.helpers.problems import SIZES, tiny_data


class Dropping(nn.Module):
    """A hidden layer and dropout of what it gives, called as `way` says."""

    def __init__(self, way: str, p: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(SIZES[0], 8)
        self.inside = nn.Sequential(nn.Tanh(), nn.Dropout(p), nn.Linear(8, 8))
        self.last = nn.Linear(8, SIZES[2])
        self.drop = nn.Dropout(p, inplace=way != "function")
        self.way = way
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if self.way in ("reentrant", "recomputed"):
            found: Any = checkpoint(self.inside, hidden, use_reentrant=self.way == "reentrant")
            return self.last(found)  # type: ignore[no-any-return]
        dropped = self.drop(hidden)
        return self.last(hidden if self.way == "statement" else dropped)  # type: ignore[no-any-return]


def run(model: nn.Module, engine: str = "sequential", **more: Any) -> prefed.Result:
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 3, "batch_size": 5, "engine": engine}
    return prefed.simulate(prefed.FedAvg(client_lr=0.1), model, tiny_data(), **settings | more)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_in_place_it_changes_what_it_is_given(engine: str) -> None:
    """Called as a statement, or for what it returns."""
    wanted = run(Dropping("function"), engine)
    for way in ("statement", "returned"):
        assert torch.equal(run(Dropping(way), engine).weights, wanted.weights)
    same(run(Dropping("statement")), run(Dropping("statement"), "vectorised"), 1e-9)


def test_in_place_without_training_nothing_changes() -> None:
    x = torch.ones(4, 6)
    with KeyedDropout(keys([3], torch.device("cpu"))[0]):
        assert nn.functional.dropout(x, 0.5, training=False, inplace=True) is x
        assert nn.functional.dropout(x, 0.0, inplace=True) is x
        assert torch.equal(x, torch.ones(4, 6))
        assert nn.functional.dropout(x, 0.5, inplace=True) is x
    assert set(x.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_samples_stay_as_they_are(engine: str) -> None:
    """In place on the batch itself, in training alone."""
    x, y = torch.ones(6, SIZES[0]).double(), torch.zeros(6, dtype=torch.int64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(SIZES[0], 3)).double()
    prefed.simulate(
        prefed.FedAvg(client_lr=0.1), model, prefed.FederatedData([(x, y)]), rounds=1,
        local_steps=2, batch_size=None, engine=engine,
    )  # fmt: skip
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # trials need none
@pytest.mark.parametrize("way", ["reentrant", "recomputed"])
def test_dropout_that_is_computed_once_more_is_refused(way: str) -> None:
    with pytest.raises(prefed.PrefedError, match=r"^model: its dropout .* turn checkpointing off"):
        run(Dropping(way))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # trials need none
@pytest.mark.parametrize("way", ["reentrant", "recomputed"])
def test_checkpointing_without_dropout(way: str) -> None:
    """Nor is that refused: another part of the model may have dropout."""
    model = Dropping(way, p=0.0)
    plain = nn.Sequential(model.first, model.inside, model.last)
    assert torch.equal(run(model).weights, run(plain).weights)
    run(nn.Sequential(model, nn.Dropout(0.5)))
