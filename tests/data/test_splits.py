"""Splits: every sample once, nobody empty, proportions as asked, and a million clients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

import prefed
from prefed.core import draws
from prefed.data.describe import heterogeneity
from prefed.data.niid_bench import dirichlet_balanced, labels_per_client
from prefed.data.splits import dirichlet, iid, natural, quantity, shards

samples = st.integers(1, 6).flatmap(
    lambda classes: st.lists(st.integers(0, classes - 1), min_size=1, max_size=300)
)


def check(parts: Any, samples: int, clients: int, min_size: int) -> None:
    assert len(parts) == clients
    assert sorted(np.concatenate(list(parts))) == list(range(samples))
    assert min(len(part) for part in parts) >= min_size


@given(samples, st.integers(1, 30), st.integers(1, 4), st.integers(0, 99))
def test_shards(labels: list[int], clients: int, per_client: int, seed: int) -> None:
    array, generator = np.array(labels), draws.generator(seed, "split")
    if clients * per_client > len(labels):
        with pytest.raises(prefed.PrefedError, match="cannot be made of"):
            shards(array, generator, clients=clients, classes_per_client=per_client)
        return
    parts = shards(array, generator, clients=clients, classes_per_client=per_client)
    check(parts, len(labels), clients, per_client)
    assert np.ptp([len(part) for part in parts]) <= per_client


def test_shards_of_equal_classes_bring_that_many_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = shards(labels, draws.generator(0, "s"), clients=50, classes_per_client=2)
    assert all(len(np.unique(labels[part])) <= 2 for part in parts)


@given(samples, st.integers(1, 30), st.floats(1e-3, 1e3), st.integers(1, 4), st.integers(0, 99))
def test_quantity(labels: list[int], clients: int, alpha: float, least: int, seed: int) -> None:
    options: Any = {"clients": clients, "alpha": alpha, "min_size": least}
    if clients * least > len(labels):
        with pytest.raises(prefed.PrefedError, match="cannot be made of"):
            quantity(np.array(labels), draws.generator(seed, "split"), **options)
        return
    parts = quantity(np.array(labels), draws.generator(seed, "split"), **options)
    check(parts, len(labels), clients, least)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=99), st.integers(1, 9))
def test_natural(keys: list[int], least: int) -> None:
    array = np.array(keys)
    groups = [np.flatnonzero(array == key) for key in sorted(set(keys))]
    wanted = [group for group in groups if len(group) >= least]
    if not wanted:
        with pytest.raises(prefed.PrefedError, match="no client has"):
            natural(array, draws.generator(0, "s"), array, min_size=least)
        return
    parts = natural(array, draws.generator(0, "s"), array, min_size=least)
    assert [part.tolist() for part in parts] == [group.tolist() for group in wanted]


def test_quantity_follows_alpha() -> None:
    """Var of a share of Dirichlet(alpha) over C clients is (1/C)(1 - 1/C) / (C*alpha + 1)."""
    for alpha in (0.5, 5.0):
        shares = [
            len(part) / 10_000
            for seed in range(300)
            for part in quantity(
                np.zeros(10_000), draws.generator(seed, "s"), clients=20, alpha=alpha
            )
        ]
        assert np.var(shares) == pytest.approx(0.05 * 0.95 / (20 * alpha + 1), rel=0.15)


def test_heterogeneity() -> None:
    assert heterogeneity(np.full((7, 10), 3)) == 0
    assert heterogeneity(np.eye(10)) == pytest.approx(0.9)


def test_labels_are_needed() -> None:
    with pytest.raises(prefed.PrefedError, match="needs one label"):
        dirichlet(np.zeros((9, 4), int), draws.generator(0, "s"), clients=2, alpha=1.0)
    with pytest.raises(prefed.PrefedError, match="natural needs a data set that says whose"):
        natural(np.zeros(9, int), draws.generator(0, "s"), None)
    assert len(iid(np.zeros((9, 4), int), draws.generator(0, "s"), clients=2)) == 2


MILLION = """
import pathlib, sys, time
import numpy as np
from prefed.core import draws
from prefed.data import splits
number = int(sys.argv[1])
labels = np.arange(2 * number) % 10
many = {"clients": number}
for split, options in (
    (splits.iid, many), (splits.dirichlet, many | {"alpha": 0.5}), (splits.shards, many),
    (splits.quantity, many | {"alpha": 0.5}),
    (splits.natural, {"keys": np.arange(2 * number) // 2}),
):
    start = time.process_time()
    parts = split(labels, draws.generator(0, "split"), **options)
    assert len(parts) == number and parts.sizes().min() >= 1
    seconds = time.process_time() - start
    print(split.__name__, f"{seconds:.1f} s")
    assert seconds < number / 100_000, split
# Not ru_maxrss: a new process inherits that from the one that started it.
status = pathlib.Path("/proc/self/status")
if status.exists():
    peak = next(l for l in status.read_text().splitlines() if l.startswith("VmHWM"))
    print(peak)
    assert int(peak.split()[1]) < 1_000_000, peak  # KB
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_clients(number: int) -> None:
    command = [sys.executable, "-c", MILLION, str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@given(samples, st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_labels_per_client(labels: list[int], clients: int, per_client: int, seed: int) -> None:
    array, names = np.array(labels), np.unique(labels)
    generator = draws.generator(seed, "split")
    if per_client > len(names) or clients < len(names):
        with pytest.raises(prefed.PrefedError, match=r"per_client: should be|are fewer than"):
            labels_per_client(array, generator, clients=clients, per_client=per_client)
        return
    try:
        parts = labels_per_client(array, generator, clients=clients, per_client=per_client)
    except prefed.PrefedError:  # nobody is left empty
        assert np.unique(array, return_counts=True)[1].min() < clients
        return
    check(parts, len(labels), clients, 1)
    assert all(len(np.unique(array[part])) <= per_client for part in parts)
    for client, part in enumerate(parts):
        owners = [i for i, p in enumerate(parts) if names[client % len(names)] in array[p]]
        count = int((array == names[client % len(names)]).sum())
        assert client in owners or count < clients, "its own label, if there are samples for all"
        assert len(part) <= len(labels)


def test_labels_per_client_divides_a_label_evenly() -> None:
    labels = np.repeat(np.arange(10), 600)
    parts = labels_per_client(labels, draws.generator(0, "s"), clients=20, per_client=2)
    table = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert ((table > 0).sum(1) == 2).all()
    for column in table.T:
        assert np.ptp(column[column > 0]) <= 1


@given(st.integers(0, 99), st.floats(0.05, 10))
def test_dirichlet_balanced(seed: int, alpha: float) -> None:
    labels = np.repeat(np.arange(5), 80)
    options: Any = {"clients": 6, "alpha": alpha, "min_size": 5}
    parts = dirichlet_balanced(labels, draws.generator(seed, "s"), **options)
    check(parts, len(labels), 6, 5)


def test_dirichlet_balanced_follows_its_definition() -> None:
    """Drawn again with the same generator, sample by sample: a full client gets nothing more."""
    labels = np.random.default_rng(1).integers(0, 4, 200)
    parts = dirichlet_balanced(labels, draws.generator(3, "s"), clients=5, alpha=0.5, min_size=1)
    generator = draws.generator(3, "s")
    while True:
        owned: list[list[int]] = [[] for _ in range(5)]
        for label in range(4):
            members = generator.permutation(np.flatnonzero(labels == label)).tolist()
            shares = generator.dirichlet([0.5] * 5)
            shares = np.array(
                [s if len(o) < 40 else 0.0 for s, o in zip(shares, owned, strict=True)]
            )
            ends = [int(e) for e in np.cumsum(shares / shares.sum()) * len(members)]
            ends[-1] = len(members)
            for client, end in enumerate(ends):
                owned[client] += members[ends[client - 1] if client else 0 : end]
        if min(map(len, owned)) >= 1:
            break
    assert [sorted(part.tolist()) for part in parts] == [sorted(o) for o in owned]


def test_dirichlet_balanced_gives_up_with_advice() -> None:
    with pytest.raises(prefed.PrefedError, match="raise alpha"):
        dirichlet_balanced(
            np.zeros(10, int), draws.generator(0, "s"), clients=5, alpha=1e-3, min_size=2
        )


def test_labels_by_name() -> None:
    labels = np.repeat(np.arange(3), 40)
    sets = [[0, 2], [1], [2, 1], [2]]
    parts = labels_per_client(labels, draws.generator(0, "s"), clients=4, sets=sets)
    assert [np.unique(labels[part]).tolist() for part in parts] == [sorted(s) for s in sets]
    assert sorted(np.concatenate([*parts]).tolist()) == [*range(120)]
    assert [len(part) for part in parts] == [54, 20, 33, 13]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[0, 1], [2]], "2 for 3 clients"),
        ([[0], [1], []], "client 2 should have"),
        ([[0], [1, 2], [7]], r"client 2 should have one or more of the labels \[0, 1, 2\]"),
        ([[0], [1], [1]], r"no client has the labels \[2\]"),
    ],
)
def test_labels_by_name_are_checked(sets: list[list[int]], message: str) -> None:
    with pytest.raises(prefed.PrefedError, match=message):
        labels_per_client(np.arange(9) % 3, draws.generator(0, "s"), clients=3, sets=sets)


def test_labels_by_name_or_by_number() -> None:
    labels, generator = np.arange(9) % 3, draws.generator(0, "s")
    with pytest.raises(prefed.PrefedError, match="per_client or sets, not both"):
        labels_per_client(labels, generator, clients=1, per_client=3, sets=[[0, 1, 2]])
    with pytest.raises(prefed.PrefedError, match="client 3 would have no sample"):
        labels_per_client(np.array([0, 1, 1, 2, 2]), generator, clients=5, per_client=1, sets=None)


def test_a_subset_is_divided_by_its_own_numbers() -> None:
    x, y = torch.arange(20.0)[:, None], torch.arange(20) % 2
    subset = Subset(TensorDataset(x, y), [10, 11, 12, 13])
    data = prefed.FederatedData(subset, parts=[[0, 3], [2, 1]])
    assert [data.client(c).all()[0].flatten().tolist() for c in range(2)] == [[10, 13], [12, 11]]
