"""Local steps that also move along the last round's mean change: what of it every engine, the wire
and the disk see. Its arithmetic is in tests/algorithms/test_oracles.py."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import prefed
from prefed.training.engines.vectorised import Vectorised
from tests.helpers.engine_runs import chain, same
from tests.helpers.problems import tiny_data

ALIGNED: list[prefed.Algorithm] = [
    prefed.FedAvg(client_lr=0.05, align=0.4),
    prefed.FedAdam(client_lr=0.05, align=0.4, align_form="mixed"),
    prefed.SCAFFOLD(client_lr=0.05, align=0.4, align_form="mixed"),
    prefed.PreFed(client_lr=0.005, align=0.4, momentum="derived", decoupled_weight_decay=0.1),
    prefed.PreFed(client_lr=0.005, align=0.4, shape="kronecker", refresh=2),
    prefed.PreFedLite(client_lr=0.005, align=0.4, align_form="mixed"),
    prefed.PreFedSync(client_lr=0.02, align=0.4),
]
STEPS = [{"local_steps": 3}, {"local_epochs": 2}]


def simulate(algorithm: prefed.Algorithm, engine: str, **options: Any) -> prefed.Result:
    settings: dict[str, Any] = {"rounds": 6, "batch_size": 4, "clients_per_round": 4} | options
    return prefed.simulate(algorithm, chain(), tiny_data(), engine=engine, device="cpu", **settings)


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("algorithm", ALIGNED, ids=lambda a: type(a).__name__)
def test_engines_and_workers(
    algorithm: prefed.Algorithm, steps: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if algorithm.client_rule().lockstep and "local_epochs" in steps:
        return
    monkeypatch.setattr(Vectorised, "most_clients", 2)
    one = simulate(algorithm, "sequential", **steps)
    tolerance = 1e-4 if algorithm.upload != "exact" else 1e-9  # a bit of a code may turn
    same(one, simulate(algorithm, "vectorised", **steps), tolerance)
    for engine in ("sequential", "vectorised"):
        first, second = (simulate(algorithm, engine, workers=n, **steps) for n in (1, 2))
        same(first, second, 0.0)
    assert one.server.shared["mean_change"].any()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_compiled() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    algorithm = prefed.PreFed(
        client_lr=0.005, align=0.4, align_form="mixed", decoupled_weight_decay=0.1
    )
    one, other = (simulate(algorithm, e, local_steps=3) for e in ("sequential", "compiled"))
    same(one, other, 1e-9)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["fedavg", "prefed"])
def test_the_mean_change_comes_down_and_never_goes_up(name: str) -> None:
    make = prefed.ALGORITHMS.get(name)
    plain, aligned = (
        simulate(make(client_lr=0.01, align=align), "sequential", local_steps=3)
        for align in (0.0, 0.3)
    )
    d = 8 * plain.weights.numel()
    for a, b in zip(plain.history, aligned.history, strict=True):
        assert {k: b[k] - a[k] for k in b if k.startswith("bytes_")} == {
            "bytes_up": 0, "bytes_up_weights": 0, "bytes_up_state": 0,
            "bytes_down": 4 * d, "bytes_down_weights": 0, "bytes_down_state": 4 * d,
        }  # fmt: skip
    assert "mean_change" not in plain.server.shared
    first = [simulate(make(client_lr=0.01, align=a), "sequential", rounds=1, local_steps=3)
             for a in (0.0, 0.3)]  # fmt: skip
    assert torch.equal(first[0].weights, first[1].weights)  # there is no last round yet
    assert not torch.equal(plain.weights, aligned.weights)


def test_the_mean_change_is_that_of_the_clients() -> None:
    """Of two rounds of one step with the whole change of the first added, whatever the server's
    step size is."""
    options: dict[str, Any] = {"clients_per_round": None, "batch_size": None, "local_steps": 1}
    algorithm = prefed.FedAvg(client_lr=0.1, server_lr=0.5, align=0.9)
    once = simulate(algorithm, "sequential", rounds=1, **options)
    start = torch.nn.utils.parameters_to_vector(chain().parameters())
    wanted = (once.weights - start) / 0.5
    torch.testing.assert_close(once.server.shared["mean_change"], wanted, rtol=0, atol=1e-12)


def test_options_that_are_not_used_are_not_written() -> None:
    """So that configs, fingerprints and messages are those of runs from before there were any."""
    new = {"align", "align_form", "decoupled_weight_decay"}
    assert not new & prefed.PreFed().model_dump().keys()
    used = prefed.PreFed(align=0.3, decoupled_weight_decay=0.1)
    assert used.model_dump()["align"] == 0.3
    assert prefed.PreFed(**used.model_dump()) == used


@pytest.mark.parametrize("align", [-0.1, 1.0])
def test_a_share_is_below_one(align: float) -> None:
    with pytest.raises(prefed.PrefedError, match=r"FedAvg\.align: should be"):
        prefed.FedAvg(align=align)
