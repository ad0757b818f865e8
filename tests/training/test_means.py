"""Robust means against NumPy, what holds for all of them, and how a run takes them."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prefed
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.core.memory import Memory
from prefed.rules import State
from prefed.training.mean import Mean
from prefed.training.means import MEANS, mean_rule
from prefed.training.means.choice import MeanChoice
from prefed.training.means.held_rows import Buckets, RobustMean
from tests.helpers.engine_runs import batchnorm
from tests.helpers.oracles import means as oracle
from tests.helpers.problems import CLIENT_SIZES, tiny_data, tiny_model

Array = npt.NDArray[np.float64]
EXACT: dict[str, Any] = {"iterations": 5000, "tolerance": 1e-14}
ALL: list[dict[str, Any]] = [
    {"name": "plain"}, {"name": "median"}, {"name": "trimmed", "share": 0.2},
    {"name": "clipped"}, {"name": "krum"}, {"name": "multi-krum", "share": 0.3},
    {"name": "multi-krum", "keep": 2}, {"name": "geometric"},
]  # fmt: skip
NAMES = [str(table) for table in ALL]


def rule(name: str, **options: Any) -> mean_rule.MeanRule:
    return MeanChoice.of({"name": name, **options}).rule


def rows_of(seed: int, clients: int, d: int = 7) -> Array:
    return np.random.default_rng(seed).normal(size=(clients, d)) * 3


def weights_of(seed: int, clients: int, kind: str) -> Array:
    drawn = np.random.default_rng(seed + 1)
    if kind == "samples":
        return drawn.integers(1, 6, clients).astype(np.float64)
    return np.ones(clients) if kind == "uniform" else drawn.uniform(0.2, 2.0, clients)


def mean_of(rule: mean_rule.MeanRule, x: Array, w: Array | None = None) -> Array:
    weights = [1.0] * len(x) if w is None else w.tolist()
    found: Array = rule.mean([*torch.from_numpy(x)], weights).numpy()
    return found


def expected(table: dict[str, Any], x: Array, w: Array) -> Array:
    n, share = len(x), table.get("share", 0.2)
    f = int(share * n + 1e-9)
    match table["name"]:
        case "trimmed":
            return oracle.trimmed(x, w, share)
        case "krum":
            return oracle.krum(x, f)
        case "multi-krum":
            return oracle.multi_krum(x, w, f, table.get("keep", n - f))
        case name:
            found: Array = getattr(oracle, name)(x, w)
            return found


@pytest.mark.parametrize("weighting", ["uniform", "samples", "own"])
@pytest.mark.parametrize("table", ALL, ids=NAMES)
def test_each_is_that_of_its_paper(
    table: dict[str, Any], weighting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of a few coordinates too."""
    table = table | (EXACT if table["name"] == "geometric" else {})
    seeds = range(2 if table["name"] == "geometric" else 6)
    for seed, clients in itertools.product(seeds, (9, 10, 15)):
        x, w = rows_of(seed, clients), weights_of(seed, clients, weighting)
        monkeypatch.setattr(mean_rule, "PIECE", 3 * clients if seed % 2 else 1 << 20)
        found = mean_of(rule(**table), x, w)
        np.testing.assert_allclose(found, expected(table, x, w), rtol=0, atol=1e-10)


def limits(table: dict[str, Any], x: Array) -> tuple[Array, Array]:
    """Of each coordinate, up to rounding. What is clipped goes towards zero."""
    low, high = x.min(0) - 1e-12, x.max(0) + 1e-12
    return (np.minimum(low, 0), np.maximum(high, 0)) if table["name"] == "clipped" else (low, high)


@pytest.mark.parametrize("table", ALL, ids=NAMES)
def test_few_clients_are_enough_to_go_on(table: dict[str, Any]) -> None:
    for clients in (1, 2, 3, 4):
        x = rows_of(5, clients)
        found = mean_of(rule(**table), x)
        low, high = limits(table, x)
        assert (low <= found).all()
        assert (found <= high).all()
        if clients == 1:
            np.testing.assert_allclose(found, x[0], rtol=1e-15)


PROBLEMS = st.tuples(st.integers(0, 10_000), st.integers(5, 14), st.sampled_from(ALL))


@settings(max_examples=80, deadline=None)
@given(PROBLEMS, st.sampled_from(["uniform", "samples"]))
def test_the_order_of_clients_does_not_matter(
    problem: tuple[int, int, dict[str, Any]], weighting: str
) -> None:
    seed, clients, table = problem
    x, w = rows_of(seed, clients), weights_of(seed, clients, weighting)
    order = np.random.default_rng(seed).permutation(clients)
    found, again = (mean_of(rule(**table), *both) for both in ((x, w), (x[order], w[order])))
    near = 1e-4 if table["name"] == "geometric" else 1e-12  # it ends where a step is short
    np.testing.assert_allclose(found, again, rtol=0, atol=near)


@settings(max_examples=80, deadline=None)
@given(PROBLEMS)
def test_between_the_least_and_the_most_of_each_coordinate(
    problem: tuple[int, int, dict[str, Any]],
) -> None:
    """And the same for all that agree."""
    seed, clients, table = problem
    x = rows_of(seed, clients)
    found = mean_of(rule(**table), x)
    low, high = limits(table, x)
    assert (low <= found).all()
    assert (found <= high).all()
    same = np.repeat(x[:1], clients, axis=0)
    np.testing.assert_allclose(mean_of(rule(**table), same), x[0], rtol=1e-13, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(5, 14), st.booleans())
def test_krum_picks_one_that_is_there(seed: int, clients: int, ties: bool) -> None:
    x = rows_of(seed, clients)
    x = np.round(x / 3) if ties else x
    found = mean_of(rule("krum"), x)
    assert any(np.array_equal(found, row) for row in x)


@pytest.mark.parametrize("size", [1e3, 1e30, 1e200])
@pytest.mark.parametrize("table", ALL[1:], ids=NAMES[1:])
def test_a_minority_of_liars_is_contained(table: dict[str, Any], size: float) -> None:
    """However far away, and whether they agree or not; the plain mean goes with them."""
    honest = rows_of(3, 8)
    for lies in (np.full((2, 7), size), np.stack([np.full(7, size), np.full(7, -size)])):
        x = np.concatenate([lies, honest])
        found = mean_of(rule(**table), x)
        assert np.linalg.norm(found) < 3 * np.linalg.norm(honest, axis=1).max()
    together = np.concatenate([np.full((2, 7), size), honest])
    assert mean_of(rule("plain"), together).min() > size / 10


def test_float32_has_the_precision_of_float32() -> None:
    for table in ALL:
        x = rows_of(2, 11, 40)
        found = rule(**table).mean([*torch.from_numpy(x).float()], [1.0] * 11)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), mean_of(rule(**table), x), atol=2e-5)


# Collecting


def collect(
    mean: Mean, x: dict[str, Tensor], weights: list[float], order: list[int], block: int
) -> tuple[State, float]:
    """Blocks of neighbours in any order."""
    for start in order:
        part = slice(start, start + block)
        values = {name: value[part] for name, value in x.items()}
        losses = [float(i) for i in range(len(weights))][part]
        mean.add_block(start, values, weights[part], losses)
    return mean.result()


@pytest.mark.parametrize("weights", [[1.0] * 11, [float(1 + i % 3) for i in range(11)]])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_buckets_are_means_of_shuffled_clients(size: int, weights: list[float]) -> None:
    """Whatever comes first; added up as it comes: with buckets of s a mean of C clients holds no
    more than C/s + log2(C) rows once all are there."""
    x = torch.from_numpy(rows_of(0, 11))
    order = np.random.default_rng(4).permutation(11).tolist()
    wanted, heavy = oracle.buckets(x.numpy(), np.array(weights), size, order)
    first = None
    for arrival in ([*range(11)], [10, 3, 7, 0, 1, 9, 2, 8, 4, 6, 5]):
        buckets = Buckets(size, order, Memory())
        for position in arrival:
            buckets.add(position, {"x": x[position]}, weights[position], 0.0)
        rows = buckets.rows()
        assert [row.weight for row in rows] == heavy.tolist()
        found = torch.stack([row.values["x"] for row in rows])
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-13)
        assert first is None or torch.equal(first, found)
        first = found
    assert torch.equal(x, torch.from_numpy(rows_of(0, 11)))


@pytest.mark.parametrize("block", [1, 3, 11])
def test_the_bits_do_not_depend_on_who_comes_first(block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = {"weights": torch.randn(11, 50, generator=generator), "P": torch.rand(11, 4, 4),
         "local_steps": torch.arange(11.0).unsqueeze(1)}  # fmt: skip
    order = np.random.default_rng(4).permutation(11).tolist()
    weights = [float(1 + i % 2) for i in range(11)]
    rules = {"weights": (rule("median"), 2), "P": (rule("geometric"), 1)}
    starts = [*range(0, 11, block)]
    memory, found = Memory(), []
    for arrival in (starts, starts[::-1]):
        mean = RobustMean(rules, order, memory)
        found.append(collect(mean, x, weights, arrival, block))
    (values, loss), (again, _) = found
    assert values.keys() == x.keys()
    assert values["P"].shape == (4, 4)
    assert all(torch.equal(values[name], again[name]) for name in x)
    share = np.array(weights) / sum(weights)
    assert float(values["local_steps"]) == pytest.approx(share @ np.arange(11))
    assert loss == pytest.approx(share @ np.arange(11))


def test_what_is_not_finite_is_not_hidden() -> None:
    x = torch.from_numpy(rows_of(0, 5))
    x[2, 3] = torch.nan
    mean = RobustMean({"weights": (rule("median"), 1)}, [*range(5)])
    values, _ = collect(mean, {"weights": x, "local_steps": x[:, :1]}, [1.0] * 5, [0], 5)
    assert values["weights"].isnan().all()


# In a run


class Listening(prefed.PreFed):
    """PreFed that keeps what its clients send, in the order of the cohort."""

    heard: ClassVar[list[State]] = []

    def before_mean(self, values: State) -> State:
        self.heard.append({n: v.clone() for n, v in values.items()})
        return values


TINY: dict[str, Any] = {
    "rounds": 2, "local_steps": 4, "batch_size": 3, "engine": "sequential", "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(("mean", "state_mean"), [
    ("median", None), ({"name": "trimmed", "share": 0.2}, "geometric"), ("plain", "median"),
    ({"name": "median", "bucket": 2}, None), ("clipped", {"name": "multi-krum", "share": 0.1}),
    ("geometric", "plain"),
])  # fmt: skip
def test_a_round_takes_these_means(mean: Any, state_mean: Any, weighting: str) -> None:
    """Weights by the one, P and m by the other, each by itself."""
    Listening.heard.clear()
    algorithm = Listening(client_lr=0.05)
    options: dict[str, Any] = {"mean": mean, "weighting": weighting}
    if state_mean is not None:
        options["state_mean"] = state_mean
    run = prefed.Run(algorithm, tiny_model(), tiny_data(), prefed.Settings(**TINY, **options))
    run.run_round()
    Listening.heard.clear()
    before = run.server.weights.numpy().copy()
    run.run_round()
    w = np.array(CLIENT_SIZES if weighting == "samples" else [1] * 6, dtype=np.float64)
    after = {"weights": run.server.weights.numpy() - before}
    after |= {n: v.numpy() for n, v in run.server.shared.items()}
    assert after.keys() == {"weights", "m", "P"}
    for name, found in after.items():
        given = mean if name == "weights" or state_mean is None else state_mean
        table: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given)
        x = torch.stack([sent[name][0] for sent in Listening.heard]).numpy()
        weights = w
        if bucket := table.pop("bucket", 0):
            order = draws.generator(3, "buckets", 1).permutation(6).tolist()
            x, weights = oracle.buckets(x, w, bucket, order)
        near = 1e-5 if table["name"] == "geometric" else 1e-10
        np.testing.assert_allclose(found, expected(table, x, weights), rtol=0, atol=near)


def weights_after(algorithm: prefed.Algorithm, model: torch.nn.Module, **options: Any) -> Tensor:
    result = prefed.simulate(algorithm, model, tiny_data(), **{**TINY, **options})
    return torch.cat([result.weights, result.server.buffers.to(result.weights.dtype)])


@pytest.mark.parametrize("mean", ["median", {"name": "trimmed", "bucket": 2}, "geometric"])
def test_the_bits_do_not_depend_on_workers_or_a_resume(mean: Any, tmp_path: Any) -> None:
    for engine in ("sequential", "vectorised"):
        make = prefed.PreFed(client_lr=0.05), batchnorm()
        options = {"mean": mean, "engine": engine, "batch_size": 4, "rounds": 4}
        one = weights_after(*make, **options)
        assert torch.equal(one, weights_after(*make, **options, workers=3))
        folder = tmp_path / engine
        stop = Stop()
        with pytest.raises(prefed.Interrupted):
            prefed.simulate(*make, tiny_data(), **TINY | options, out=folder, callbacks=[stop])
        rest = prefed.simulate(*make, tiny_data(), **TINY | options, out=folder, resume=True)
        assert len(rest.history) == 4
        assert torch.equal(one[: len(rest.weights)], rest.weights)


class Stop(prefed.Callback):
    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            self.run.stop()


def test_the_plain_mean_is_as_it_was() -> None:
    """Its bits, and what is written down of it."""
    plain = prefed.Settings(**TINY)
    assert prefed.Settings(**TINY, mean="plain", state_mean=None).to_dict() == plain.to_dict()
    assert not {"mean", "state_mean", "attackers"} & plain.to_dict().keys()
    both = prefed.Settings(**TINY, mean="median", state_mean={"name": "trimmed", "share": 0.1})
    assert prefed.Settings(**both.to_dict()) == both
    one = weights_after(prefed.PreFed(), tiny_model())
    assert torch.equal(one, weights_after(prefed.PreFed(), tiny_model(), mean="plain"))
    assert not torch.equal(one, weights_after(prefed.PreFed(), tiny_model(), state_mean="median"))


def test_drift_is_that_of_a_plain_mean() -> None:
    history = prefed.simulate(prefed.FedAvg(), tiny_model(), tiny_data(), **TINY, mean="median")
    assert [record["drift"] for record in history.history] == [None, None]
    assert all(record["update_norm"] > 0 for record in history.history)


@pytest.mark.parametrize("mean", ["median", "krum"])
def test_other_parts_of_a_mean_go_along(mean: str) -> None:
    """FedNova's numbers of gradients are averaged; unequal steps; the statistics of BatchNorm have
    the mean of the state."""
    options: dict[str, Any] = {"mean": mean, "local_epochs": 1, "local_steps": None}
    weights_after(prefed.FedNova(), tiny_model(), **options)
    apart = weights_after(prefed.FedAvg(), batchnorm(), mean="plain", state_mean=mean)
    alike = weights_after(prefed.FedAvg(), batchnorm())
    assert not torch.equal(apart, alike)


@pytest.mark.parametrize(("options", "words"), [
    ({"mean": "medain"}, 'mean: unknown mean .medain.; did you mean "median"'),
    ({"mean": {"name": "trimmed", "share": 0.5}}, "mean: share: should be less than 0.5, not 0.5"),
    ({"mean": {"name": "trimmed", "sahre": 0.1}}, "mean: sahre: unknown option"),
    ({"mean": {"share": 0.1}}, "mean: should be a name"),
    ({"mean": ["median"]}, "mean: should be a name"),
    ({"state_mean": 3}, "state_mean: should be a name"),
    ({"mean": {"name": "median", "bucket": 0}}, "mean: bucket: should be a whole number"),
    ({"mean": {"name": "trimmed", "share": 0.3, "bucket": 2}}, "no mean bears half"),
    ({"mean": {"name": "plain", "bucket": 2}}, "means of means"),
    ({"mean": "krum", "weighting": "samples"}, 'mean: "krum" takes one client as it is'),
    ({"mean": {"name": "krum", "share": 0.4}}, 'mean: "krum" needs 7 clients to bear 2'),
    ({"mean": {"name": "multi-krum", "share": 0.2, "bucket": 2}}, "needs 5 buckets to bear 1"),
])  # fmt: skip
def test_what_cannot_be_is_told_before_the_first_round(options: Any, words: str) -> None:
    with pytest.raises(PrefedError, match=words):
        prefed.simulate(prefed.FedAvg(), tiny_model(), tiny_data(), **TINY, **options)


@pytest.mark.parametrize(("algorithm", "mean", "words"), [
    (prefed.PreFedSync(), "median", "average every gradient"),
    (prefed.ALGORITHMS.get("prefed")(aggregate="sqrtP"), "median", "weights each coordinate"),
    (prefed.PreFed(shape="full"), "median", "P of PreFed holds matrices"),
    (prefed.PreFed(shape="kronecker"), "trimmed", "P of PreFed holds matrices"),
])  # fmt: skip
def test_algorithms_that_cannot_have_them(algorithm: Any, mean: str, words: str) -> None:
    with pytest.raises(PrefedError, match=words):
        prefed.simulate(algorithm, tiny_model(), tiny_data(), **TINY, mean=mean)


@pytest.mark.parametrize("state_mean", ["geometric", "clipped", "multi-krum"])
def test_matrices_stay_semi_definite(state_mean: str) -> None:
    """By means that weight whole clients."""
    options: dict[str, Any] = {"mean": "median", "state_mean": state_mean}
    algorithm = prefed.PreFed(shape="full", client_lr=0.05)
    result = prefed.simulate(algorithm, tiny_model(), tiny_data(), **TINY, **options)
    P = result.server.shared["P"]
    assert float(torch.linalg.eigvalsh(P).min()) > -1e-12
    assert float(P.diagonal().max()) > 0


def test_every_mean_is_tried_here() -> None:
    assert {table["name"] for table in ALL} == {*MEANS.names()}
