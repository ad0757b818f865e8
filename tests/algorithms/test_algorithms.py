"""One battery for every registered algorithm."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import prefed
from prefed.experiments.config import algorithms_of, load
from prefed.rules.wrapped import MEAN_CHANGE
from prefed.training.server_state import policy
from tests.helpers.device import DEVICE
from tests.helpers.problems import WITHOUT_NORMS

NAMES = prefed.ALGORITHMS.names()
STEPS, COHORT, ROUNDS = 5, 5, 8


def config(name: str, *changes: str) -> Any:
    rates = {
        "prefedsync": 0.05,
        "adaalter": 0.02,
        "prefed": 0.01,
        "prefedlite": 0.01,
        "prefedm": 0.01,
        "prefedmlite": 0.01,
        "prefeds": 0.05,
        "prefedslite": 0.05,
        "prefedc": 0.05,
        "prefedclite": 0.05,
        "localadam": 0.01,
        "fedcm": 1.0,
        "fedlada": 0.03,
        "fedadamw": 0.01,
        "fedlion": 0.003,
        "fedpm": 0.01,
        "fedmuon": 0.05,
        "mimelite": 1.0,
        "fedpac": 0.01,
    }
    return load(
        "digits-iid",
        [
            f"rounds={ROUNDS}",
            f"local_steps={STEPS}",
            f"clients_per_round={COHORT}",
            "data.split.clients=12",
            "model.hidden=[16]",
            f"device={DEVICE}",
            f"algorithm={name}",
            f"algorithm.client_lr={rates.get(name, 0.3)}",
            *changes,
        ],
    )


def run(name: str, *changes: str) -> prefed.Simulation:
    simulation: prefed.Simulation = config(name, *changes).make_run()
    for _ in range(ROUNDS):
        simulation.run_round()
    return simulation


@cache
def finished(name: str) -> prefed.Simulation:
    """For tests that only look."""
    return run(name)


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_loss_falls(name: str) -> None:
    history = finished(name).history
    assert history[-1]["test_loss"] < history[0]["test_loss"]
    assert history[-1]["train_loss"] < 0.9 * history[0]["train_loss"]


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_two_runs_give_the_same_bits(name: str) -> None:
    first = finished(name)
    torch.manual_seed(123)  # the global generator has no say
    second = run(name)
    assert torch.equal(first.server.weights, second.server.weights)
    for a, b in zip(first.history, second.history, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_state_has_the_declared_names_and_shapes(name: str) -> None:
    simulation = finished(name)
    algorithm, server = simulation.algorithm, simulation.server
    flat = simulation.task.flat
    client = algorithm.client_rule().fields(flat.shared)
    optimiser = algorithm.server_rule().fields(flat.shared)
    first = next(iter(simulation.kept.values()), {})
    personal = {n: v for n, v in first.items() if n.startswith("personal")}
    assert sum(v.numel() for v in personal.values()) == flat.layout.size - flat.shared.size
    assert {n: f.shape for n, f in optimiser.items()} == {
        n: tuple(v.shape) for n, v in server.optimiser.items()
    }
    for kinds, held in (
        ({"average", "derived"}, {n: v for n, v in server.shared.items() if n != MEAN_CHANGE}),
        ({"keep"}, {n: v for n, v in first.items() if n not in personal}),
    ):
        declared = {n: f.shape for n, f in client.items() if policy(algorithm, n).kind in kinds}
        assert declared == {n: tuple(v.shape) for n, v in held.items()}
    assert (MEAN_CHANGE in server.shared) == (algorithm.align > 0)
    took_part = {c for record in simulation.history for c in record["cohort"]}
    keeps = personal or any(policy(algorithm, n).kind == "keep" for n in client)
    assert set(simulation.kept) == (took_part if keeps else set())


VARYING = {
    "prefedlite",
    "prefedm",
    "prefedmlite",
    "prefeds",
    "prefedslite",
    "prefedc",
    "prefedclite",
    "fedadamw",
    "fedmuon",
    "fedpac",
}
"""Their messages are not a whole number of vectors: see test_exchange.py and their own tests."""
UPLOADS = {"adaalter": 2, "prefed": 3, "scaffold": 2, "mimelite": 2, "prefedsync": STEPS + 2}
UPLOADS |= {"fedlada": 2, "fedlion": 2, "fedpm": 3}
ONLY_DOWN = {"fedcm": 1, "fedlada": 1}
"""Vectors that come down and never go up."""


@pytest.mark.parametrize("name", [n for n in WITHOUT_NORMS if n not in VARYING])
def test_bytes_are_those_of_the_declared_sharing(name: str) -> None:
    check_bytes(name, UPLOADS.get(name, 1))


@pytest.mark.parametrize(("momentum", "vectors"), [("average", 3), ("reset", 2), ("keep", 2)])
def test_bytes_of_prefed(momentum: str, vectors: int) -> None:
    check_bytes("prefed", vectors, f"algorithm.momentum={momentum}")


@pytest.mark.parametrize(("means", "numbers"), [("tensor", 4), ("row", 52), ("whole", 1210)])
def test_bytes_of_fedadamw(means: str, numbers: int) -> None:
    """The means of v, 16 + 16 + 10 + 10 of them with a row each, and a mass; the direction comes
    down, too."""
    simulation = config("fedadamw", f"algorithm.means={means}").make_run()
    record, d = simulation.run_round(), simulation.server.weights.numel()
    assert d == 1210
    assert record["bytes_up_weights"] == record["bytes_down_weights"] == 4 * d * COHORT
    assert record["bytes_up_state"] == 4 * (numbers + 1) * COHORT
    assert record["bytes_down_state"] == 4 * (numbers + 1 + d) * COHORT


def check_bytes(name: str, vectors: int, *changes: str) -> None:
    simulation = config(name, *changes).make_run()
    record, d = simulation.run_round(), simulation.server.weights.numel()
    for way, more in (("up", 0), ("down", ONLY_DOWN.get(name, 0))):
        vectors += more
        assert record[f"bytes_{way}"] == 4 * d * COHORT * vectors
        assert record[f"bytes_{way}_weights"] == 4 * d * COHORT
        assert record[f"bytes_{way}_state"] == 4 * d * COHORT * (vectors - 1)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_name_the_nearest(name: str) -> None:
    make = prefed.ALGORITHMS.get(name)
    with pytest.raises(prefed.PrefedError, match=r"client_lrr: unknown option.*client_lr"):
        make(client_lrr=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_float64_and_batchnorm_buffers(name: str) -> None:
    """Buffers are averaged and never preconditioned, counters included."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    ).double()
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(9, 3, generator=generator).double(), torch.arange(9) % 2) for _ in range(4)
    ]
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=1e-12, statistics="average")
    result = prefed.simulate(
        algorithm,
        model,
        prefed.FederatedData(clients, test=clients[0]),
        rounds=2,
        local_steps=3,
        batch_size=None,
        device=DEVICE,
    )
    counters = {name: value.cpu() for name, value in result.model.named_buffers()}
    assert counters["1.num_batches_tracked"] == 6
    # With weights that hardly move, the running mean is an average over clients of known values.
    with torch.no_grad():
        means = torch.stack([model[0](x).mean(0) for x, _ in clients])
    expected = means.mean(0) * (1 - 0.9**6)
    if (r := algorithm.mean_of_rounds) is not None:  # of two rounds of three steps
        first, share = means.mean(0) * (1 - 0.9**3), (1 + r) / (2 + r)
        expected = (1 - share) * first + share * expected
    torch.testing.assert_close(counters["1.running_mean"], expected, rtol=1e-6, atol=1e-8)
    assert result.weights.isfinite().all()
    assert all(p.grad is None for p in model.parameters())  # the model is not trained itself
    assert not dict(model.named_buffers())["1.running_mean"].any()


PLUGIN = '''
import prefed
from prefed.rules import SGD


@prefed.ALGORITHMS.register("halfavg")
class HalfAvg(prefed.Algorithm):
    """FedAvg at half the step."""

    client_lr: float = 0.1
    half: float = 0.5

    def client_rule(self) -> prefed.Rule:
        return HalfSGD(self.half)


class HalfSGD(SGD):
    def __init__(self, half):
        super().__init__()
        object.__setattr__(self, "half", half)

    def fields(self, layout):
        return {"seen": prefed.Field((layout.size,))}

    def step(self, w, g, state, lr, k):
        state["seen"].add_(1)
        w.add_(g, alpha=-lr * self.half)
'''


@pytest.mark.process
def test_an_algorithm_is_one_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_algorithm.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(prefed.ALGORITHMS, "_things", dict(prefed.ALGORITHMS._things))
    ours = run("my_algorithm:HalfAvg", "algorithm.client_lr=0.1")
    assert "halfavg" in prefed.ALGORITHMS.names()
    fedavg = run("fedavg", "algorithm.client_lr=0.05", "algorithm.client_momentum=0")
    assert torch.equal(ours.server.weights, fedavg.server.weights)

    from tests.helpers.commands import prefed_command, prefed_here

    chosen = ("--set", "algorithm=my_algorithm:HalfAvg")
    options = ("--set", "half=0.25", "--set", "rounds=2", "--out", "out")
    out = prefed_command("run", "digits-iid", *chosen, *options, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "half = 0.25" in (tmp_path / "out" / "config.toml").read_text()
    mistake = ("--set", "algorithm.haalf=1")
    wrong = prefed_here("validate", "digits-iid", *chosen, *mistake, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "half" in wrong.stderr


def test_presets_have_step_sizes_for_the_seven() -> None:
    for preset in ("digits-iid", "digits-noniid"):
        names = {"fedavg", "fedadagrad", "fedadam", "fedyogi", "adaalter", "prefed", "prefedopt"}
        assert names <= set(algorithms_of(preset))


def test_options_that_came_later_are_written_if_they_are_used() -> None:
    """A run from before they were there is known again, and can go on."""
    assert "refresh" not in prefed.PreFedS().model_dump()
    assert prefed.PreFedS(refresh=3).model_dump()["refresh"] == 3
    assert prefed.PreFed().model_dump()["refresh"] == 1  # it always was
