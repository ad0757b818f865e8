"""The benchmark's parts work; what they measure is for the benchmark to say."""

from __future__ import annotations

import runpy
from functools import partial

import pytest
import torch

from prefed.bench.bare import LR, Client
from prefed.bench.ratios import bench_config, interleaved
from prefed.bench.workloads import _resnet18, w1
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
