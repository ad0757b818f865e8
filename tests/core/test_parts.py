"""Layout, mean, draws, schedules and splits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import prefed
from prefed.core import draws, schedule
from prefed.core.flat_model import FlatModel
from prefed.data.splits import dirichlet, iid
from prefed.training.mean import Mean


def test_flat_model_shares_memory_and_keeps_channels_last() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9)
    model.eval()
    expected = model(x)
    flat = FlatModel(model)
    assert flat.layout.size == sum(p.numel() for p in model.parameters())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    views = flat.layout.views(flat.gradient)
    assert torch.equal(views["0.weight"], model[0].weight.grad)
    flat.weights.zero_()
    assert not model[2].bias.any()
    model.train()
    with torch.no_grad():
        flat.buffers.watch(model, x)
    assert flat.buffers.changing == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    first = flat.read_buffers()
    assert torch.equal(first, torch.cat([torch.zeros(8), torch.ones(8)]))
    model(x)
    assert not torch.equal(flat.read_buffers(), first)
    assert model[1].num_batches_tracked == 1
    flat.write_buffers(first, torch.tensor(7))
    assert torch.equal(model[1].running_var, torch.ones(8))
    assert model[1].num_batches_tracked == 7
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    flat = FlatModel(model)
    assert [e.name for e in flat.layout.entries] == ["0.weight", "0.bias"]


@given(st.integers(1, 40), st.randoms(use_true_random=False), st.sampled_from([None, 3]))
def test_mean_has_the_same_bits_in_any_order(
    clients: int, shuffle: random.Random, missing: int | None
) -> None:
    generator = torch.Generator().manual_seed(clients)
    rows = torch.randn(clients, 7, generator=generator) * 1e3
    weights = [float(1 + i % 3) for i in range(clients)]
    order = [i for i in range(clients) if i != missing or clients == 1]

    def mean(positions: list[int]) -> tuple[torch.Tensor, float]:
        collected = Mean()
        for i in positions:
            collected.add(i, {"w": rows[i].clone()}, weights[i], float(i))
        values, loss = collected.result()
        return values["w"], loss

    ordered, loss = mean(order)
    shuffle.shuffle(order)
    shuffled, same_loss = mean(order)
    assert torch.equal(ordered, shuffled)
    assert loss == same_loss
    order.sort()
    exact = np.average(rows[order].double(), axis=0, weights=[weights[i] for i in order])
    np.testing.assert_allclose(ordered, exact, rtol=1e-4, atol=1e-3)


def test_mean_does_not_change_what_it_is_given() -> None:
    rows = torch.ones(5, 3)
    collected = Mean()
    for i, row in enumerate(rows):
        collected.add(i, {"w": row}, 1.0, 0.0)
    collected.result()
    assert torch.equal(rows, torch.ones(5, 3))


def test_draws_depend_on_their_key_alone() -> None:
    first = draws.batches(0, 3, 7, 100, 200).tolist()
    draws.cohort(0, 3, 1000, 10)
    np.random.seed(5)
    assert draws.batches(0, 3, 7, 100, 200).tolist() == first
    for other in ((1, 3, 7), (0, 4, 7), (0, 3, 8), (0, 7, 3)):
        assert draws.batches(*other, 100, 200).tolist() != first
    assert draws.cohort(0, 1, 50, 10) != draws.cohort(0, 2, 50, 10)


def test_draws_are_pinned() -> None:
    """Results published with one version must come out of the next: these may never change."""
    assert draws.cohort(0, 0, 50, 5) == [9, 17, 22, 34, 41]
    assert draws.batches(0, 0, 0, 100, 6).tolist() == [57, 74, 81, 72, 58, 28]
    assert draws.torch_seed(0, "weights") == 1217581646525645954


def test_cohorts_are_uniform() -> None:
    counts = np.zeros(20)
    for round in range(4000):
        cohort = draws.cohort(1, round, 20, 5)
        assert cohort == sorted(set(cohort))
        counts[cohort] += 1
    expected, deviation = 1000, np.sqrt(4000 * 0.25 * 0.75)
    assert np.abs(counts - expected).max() < 5 * deviation


def test_schedules() -> None:
    step = schedule.step(0.05, decay=0.1, every=20)
    assert [step(0), step(19), step(20), step(40)] == pytest.approx([0.05, 0.05, 0.005, 0.0005])
    cosine = schedule.cosine(1.0, rounds=10, end=0.2)
    assert [cosine(0), cosine(5), cosine(10), cosine(99)] == pytest.approx([1, 0.6, 0.2, 0.2])
    warm = schedule.warmup(step, rounds=4)
    assert [warm(0), warm(3), warm(4), warm(24)] == pytest.approx([0.01, 0.04, 0.05, 0.005])
    assert prefed.FedAvg(client_lr=step).client_lr == step


labels_strategy = st.integers(1, 6).flatmap(
    lambda classes: st.lists(st.integers(0, classes - 1), min_size=1, max_size=300)
)


@given(labels_strategy, st.integers(1, 20), st.integers(0, 99))
def test_iid_uses_every_sample_once(labels: list[int], clients: int, seed: int) -> None:
    array = np.array(labels)
    if clients > len(labels):
        with pytest.raises(prefed.PrefedError):
            iid(array, draws.generator(seed, "split"), clients=clients)
        return
    parts = iid(array, draws.generator(seed, "split"), clients=clients)
    check_partition(parts, len(labels), clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(
    labels_strategy,
    st.integers(1, 20),
    st.floats(1e-3, 1e3),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_dirichlet_uses_every_sample_once(
    labels: list[int], clients: int, alpha: float, min_size: int, seed: int
) -> None:
    options: Any = {"clients": clients, "alpha": alpha, "min_size": min_size}
    if clients * min_size > len(labels):
        with pytest.raises(prefed.PrefedError):
            dirichlet(np.array(labels), draws.generator(seed, "split"), **options)
        return
    parts = dirichlet(np.array(labels), draws.generator(seed, "split"), **options)
    check_partition(parts, len(labels), clients)
    assert min(len(part) for part in parts) >= min_size


def check_partition(parts: Any, samples: int, clients: int) -> None:
    assert len(parts) == clients
    assert sorted(np.concatenate(parts)) == list(range(samples))


def test_dirichlet_follows_alpha() -> None:
    """Var(share) of Dirichlet(alpha) over C clients is (1/C)(1 - 1/C) / (C*alpha + 1)."""
    labels = np.repeat(np.arange(200), 500)
    for alpha in (0.1, 1.0, 10.0):
        parts = dirichlet(labels, draws.generator(0, "split"), clients=10, alpha=alpha)
        shares = np.stack([np.bincount(labels[p], minlength=200) for p in parts]) / 500
        assert shares.var() == pytest.approx(0.09 / (10 * alpha + 1), rel=0.1)


def test_small_alpha_means_few_classes() -> None:
    dataset = prefed.DATASETS.get("digits")()
    assert dataset.test is not None
    assert (len(dataset.x), len(dataset.test[0])) == (1437, 360)

    def classes_per_client(alpha: float) -> float:
        parts = dirichlet(dataset.y.numpy(), draws.generator(0, "s"), clients=20, alpha=alpha)
        return float(np.mean([len(np.unique(dataset.y.numpy()[p])) for p in parts]))

    assert classes_per_client(0.05) < 4 < 9 < classes_per_client(100)
