"""What FedMuon sends, keeps and refuses; that it is right, test_oracles.py says."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from tests.helpers.engine_runs import run, same
from tests.helpers.problems import SIZES, tiny_data, tiny_model

MATRICES = SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2]
VECTORS = SIZES[1] + SIZES[2]


def test_momenta_of_matrices_go_up_and_down() -> None:
    for momentum in ("control", "average"):
        result = trained(prefed.FedMuon(momentum=momentum), tiny_model(), clients_per_round=4)
        record = result.history[-1]
        for way in ("up", "down"):
            assert record[f"bytes_{way}_weights"] == 4 * 8 * (MATRICES + VECTORS)
            assert record[f"bytes_{way}_state"] == 4 * 8 * MATRICES
        kept = {name: len(value) for name, value in result.kept[0].items()} if result.kept else {}
        assert kept == ({"c_i": MATRICES} if momentum == "control" else {})


def trained(algorithm: prefed.Algorithm, model: nn.Module, **settings: Any) -> prefed.Result:
    asked: dict[str, Any] = {"rounds": 6, "local_steps": 3, "device": "cpu"} | settings
    return prefed.simulate(algorithm, model, tiny_data(), **asked)


def test_a_model_needs_matrices_and_no_vectors() -> None:
    class Diagonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((SIZES[0],), 0.1).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w)[:, : SIZES[2]]

    for momentum in ("control", "average"):
        algorithm = prefed.FedMuon(momentum=momentum)
        with pytest.raises(prefed.PrefedError, match="muon: the model has no matrix"):
            trained(algorithm, Diagonal())
        history = trained(algorithm, nn.Linear(SIZES[0], SIZES[2], bias=False).double()).history
        assert history[-1]["train_loss"] < history[0]["train_loss"]


def test_by_name_in_a_pair() -> None:
    """Local Muon with averaged momenta is FedMuon, to the last bit."""
    pair = prefed.Pair(client="muon", share={"momentum": "average"}, client_lr=0.02)
    ours = trained(pair, tiny_model())
    theirs = trained(prefed.FedMuon(momentum="average"), tiny_model())
    assert torch.equal(ours.weights, theirs.weights)
    with pytest.raises(prefed.PrefedError, match="no such state; it has momentum, m, v"):
        prefed.Pair(client="muon", share={"P": "average"})


def test_personal_parts_are_refused() -> None:
    with pytest.raises(prefed.PrefedError, match=r"FedMuon.personal: its client rule joins"):
        trained(prefed.FedMuon(personal=("@last",)), tiny_model())


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_compiled_steps() -> None:
    one, other = (run("fedmuon", tiny_model(), e, rounds=2) for e in ("vectorised", "compiled"))
    same(one, other, 1e-9)
