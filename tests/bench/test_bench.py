"""The benchmark's parts work; what they measure is for the benchmark to say."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from prefed.algorithms.fedavg import FedAvg
from prefed.bench.bare import LR, Alone, Client
from prefed.bench.ratios import HEAD, How, bench, bench_config, interleaved, simulation
from prefed.bench.workloads import WORKLOADS, Workload, _resnet18, w1
from prefed.experiments.config import load
from tests.helpers import ROOT


def test_the_bare_loop_is_fedavg() -> None:
    """Against torch.optim.SGD with the same batches."""
    client = Client(w1(clients=100))
    weights = client.flat.weights.clone()
    torch.manual_seed(3)
    total = client.train(weights, [4, 7])
    torch.manual_seed(3)
    expected = torch.zeros_like(weights)
    for number in (4, 7):
        client.flat.weights.copy_(weights)
        optimiser = torch.optim.SGD(client.flat.module.parameters(), LR)
        samples = client.work.data.client(number)
        for _ in range(client.work.local_steps):
            x, y = samples.take(torch.randint(len(samples), (20,)))
            client.flat.gradient.zero_()
            torch.nn.functional.cross_entropy(client.flat.module(x), y).backward()
            optimiser.step()
        expected += client.flat.weights
    torch.testing.assert_close(total, expected)


def test_resnet_has_the_shape_it_says() -> None:
    model = _resnet18(16)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 701_466


def small(name: str) -> Workload:
    """Two clients of a workload, for one step."""
    return replace(WORKLOADS[name](), clients_per_round=2, local_steps=1, batch_size=2)


@pytest.mark.parametrize("name", ["W5", "W6", "W7"])
def test_a_workload_trains_as_its_bare_loop_does(name: str) -> None:
    work = small(name)
    run = simulation(work, FedAvg(client_lr=LR), "sequential", 1)
    loop = Alone(work)
    loop.round()
    assert run.history[0]["train_loss"] == pytest.approx(math.log(SCORES[name]), rel=0.1)
    assert loop.weights.isfinite().all()
    assert len(loop.weights) == len(run.server.weights)


SCORES = {"W5": 90, "W6": 10, "W7": 90}
"""Classes: a model that has learnt nothing has the logarithm of their number as its loss."""


@pytest.mark.process
def test_what_is_measured_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bare loops, two engines, one thread; beside a busy process."""
    monkeypatch.setitem(WORKLOADS, "W1", partial(small_w1, WORKLOADS["W1"]))
    found = bench("W1", How(passes=1, engines=("sequential", "vectorised"), beside=1))
    assert [label.split(" ", 1)[1] for label in found.bare] == [
        "client at a time", "threads", "processes"
    ]  # fmt: skip
    assert [how for how, *_ in found.ours] == [
        "sequential x 1 with 1 thread", "vectorised x 1 with 1 thread"
    ]  # fmt: skip
    rows = [*found.rows()]
    assert {row.count("|") for row in (*HEAD, *rows)} == {6}
    best, (how, fedavg, prefed) = min(found.bare.values()), found.ours[0]
    assert rows[0].endswith(f"| {how} | {fedavg / best:.2f} | {prefed / fedavg:.2f} |")
    text = "\n".join(found.lines())
    assert "beside 1 busy processes" in text
    assert "one thread in all" in text


def small_w1(made: Callable[[], Workload]) -> Workload:
    return replace(made(), clients_per_round=4)


def test_a_config_of_the_users_own() -> None:
    lines = list(bench_config(load("digits-iid", ["rounds=2", "local_steps=1"]), passes=1))
    assert len(lines) == 3
    assert "sequential x 1" in lines[2]


def test_passes_are_interleaved() -> None:
    seen: list[str] = []
    interleaved({name: partial(seen.append, name) for name in "ab"}, passes=2)
    assert seen == list("ababab")


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "bench").glob("*.py")))
def test_benchmarks_import_what_is_there(path: str) -> None:
    runpy.run_path(str(ROOT / "bench" / path), run_name="imported")
