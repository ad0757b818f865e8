"""Local epochs: unequally many local steps, and short batches, the same in every engine.

The algorithms themselves are compared with NumPy in tests/algorithms/test_oracles.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prefed
from prefed.core.errors import PrefedError
from prefed.experiments.config import load
from prefed.training import batches
from prefed.training.engines.vectorised import Vectorised
from tests.helpers.engine_runs import Net, batchnorm, chain, run, same
from tests.helpers.problems import CLIENT_SIZES, WITHOUT_NORMS, tiny_data, tiny_model
from tests.helpers.run_folders import small, whole_and_resumed

EPOCHS: dict[str, Any] = {"local_steps": None, "local_epochs": 2, "rounds": 6}
ALONE = [name for name in WITHOUT_NORMS if name != "prefedsync"]


def settings(**options: Any) -> prefed.Settings:
    return prefed.Settings(rounds=1, **options)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("size", [1, 4, 5, 7, 20, None])
def test_batches_are_those_of_a_data_loader(size: int | None, drop: bool) -> None:
    asked = settings(local_epochs=3, batch_size=size, drop_last=drop)
    for client, samples in enumerate(CLIENT_SIZES):
        x = torch.arange(samples)
        loader = DataLoader(TensorDataset(x), size or samples, drop_last=drop)
        wanted = [len(part[0]) for part in loader] or [samples]  # at least one step
        made = batches.Batches(prefed.data.Samples(x, x), client, 0, asked)
        found = [made[k][0] for k in range(len(made))]
        assert [len(part) for part in found] == 3 * wanted
        assert len(made) == asked.steps(samples)
        for epoch in range(3):
            seen = torch.cat(found[epoch * len(wanted) : (epoch + 1) * len(wanted)])
            assert len(set(seen.tolist())) == len(seen) == sum(wanted)


@pytest.mark.parametrize("options", [EPOCHS, {"local_steps": 7}], ids=["epochs", "steps"])
def test_it_does_not_matter_how_many_batches_are_gathered_at_a_time(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("fedavg", chain(), "sequential", **options)
    for together in (1, 60):
        monkeypatch.setattr(batches, "TOGETHER", together)
        same(run("fedavg", chain(), "sequential", **options), whole, 1e-12)  # lies elsewhere


@pytest.mark.parametrize("model", [chain(), Net().double()], ids=["chain", "vmap"])
@pytest.mark.parametrize("name", ALONE)
def test_vectorised_equals_sequential(name: str, model: nn.Module) -> None:
    a, b = (run(name, model, engine, **EPOCHS) for engine in ("sequential", "vectorised"))
    same(a, b, 1e-9)
    assert [r["local_steps"] for r in a.history] == [r["local_steps"] for r in b.history]
    taken = {math.ceil(CLIENT_SIZES[c] / 4) * 2 for r in a.history for c in r["cohort"]}
    assert len(taken) > 2


@pytest.mark.parametrize("options", [
    {"drop_last": True}, {"batch_size": None}, {"batch_size": 20}, {"weighting": "samples"},
    {"data": "augmented"}, {"data": "equal"}, {"data": "ignored", "drop_last": True},
], ids=str)  # fmt: skip
def test_vectorised_with_other_batches(options: dict[str, Any]) -> None:
    data, clients = tiny_data(), [tiny_data().client(c) for c in range(len(CLIENT_SIZES))]
    pairs = [(s.x, s.y.clone()) for s in clients]
    if options.get("data") == "augmented":
        noise = lambda x, rng: x + torch.from_numpy(rng.normal(size=x.shape))  # noqa: E731
        data = prefed.FederatedData(pairs, test=pairs[0], augment=noise)
    elif options.get("data") == "equal":
        data = prefed.FederatedData([(x[:4], y[:4]) for x, y in pairs], test=pairs[0])
    elif options.get("data") == "ignored":
        options = options | {"loss": nn.CrossEntropyLoss()}
        for _, y in pairs:
            y[1] = -100
        data = prefed.FederatedData(pairs, test=pairs[0])
    a, b = (
        run("scaffold", chain(), engine, **EPOCHS | options | {"data": data})
        for engine in ("sequential", "vectorised")
    )
    same(a, b, 1e-9)


@pytest.mark.parametrize("statistics", ["average", "keep", "reset"])
def test_statistics_and_their_counters(statistics: Any) -> None:
    algorithm = prefed.FedAvg(client_lr=0.05, statistics=statistics)
    results = [
        prefed.simulate(algorithm, batchnorm(), tiny_data(), rounds=3, local_epochs=2, batch_size=3,
                        drop_last=True, engine=engine)
        for engine in ("sequential", "vectorised")
    ]  # fmt: skip
    same(results[0], results[1], 1e-9)
    steps = [2 * (n // 3) for n in CLIENT_SIZES]
    counter = int(results[0].model.state_dict()["1.num_batches_tracked"])
    assert counter == (3 * round(sum(steps) / 6) if statistics == "average" else 0)
    if statistics == "keep":
        own = [result.client_model(4).state_dict()["1.num_batches_tracked"] for result in results]
        assert [int(n) for n in own] == [3 * steps[4]] * 2


@pytest.mark.parametrize("name", ["prefed", "scaffold", "fednova"])
def test_bits_do_not_depend_on_workers_and_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vectorised, "most_clients", 2)
    for engine in ("sequential", "vectorised"):
        options = EPOCHS | {"clients_per_round": 5, "weighting": "samples"}
        one, two = (run(name, chain(), engine, workers=n, **options) for n in (1, 2))
        same(one, two, 0.0)


def test_a_personal_part_with_derived_momentum() -> None:
    results = [
        prefed.simulate(
            prefed.PreFed(client_lr=0.01, momentum="derived", personal=("@last",)),
            tiny_model(), tiny_data(), rounds=4, local_epochs=2, batch_size=4, engine=engine,
        )
        for engine in ("sequential", "vectorised")
    ]  # fmt: skip
    same(results[0], results[1], 1e-9)
    assert "personal.m" in results[0].kept[0]


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    config = small("prefed", "algorithm.momentum=derived", "local_epochs=2", "batch_size=5")
    assert config.local_steps is None
    whole, resumed = whole_and_resumed(config, tmp_path)
    assert torch.equal(whole.weights, resumed.weights)
    assert [r["local_steps"] for r in whole.history] == [r["local_steps"] for r in resumed.history]


@pytest.mark.long
def test_auto_measures_clients_of_unequal_size() -> None:
    many = prefed.FederatedData([tiny_data().client(c % 6).all() for c in range(40)])
    options = {"rounds": 20, "local_epochs": 3, "batch_size": 4, "weighting": "samples"}
    model = nn.Sequential(nn.Linear(5, 400), nn.ReLU(), nn.Linear(400, 3)).double()
    a, b = (
        prefed.simulate(prefed.FedAvg(client_lr=0.05), model, many, engine=engine, **options)  # type: ignore[arg-type]
        for engine in ("auto", "sequential")
    )
    torch.testing.assert_close(a.weights, b.weights, rtol=0, atol=1e-9)


def test_with_equally_many_steps_fednova_is_fedavg() -> None:
    nova, avg = (run(name, chain(), "sequential") for name in ("fednova", "fedavg"))
    torch.testing.assert_close(nova.weights, avg.weights, rtol=0, atol=1e-12)
    nova, avg = (run(name, chain(), "sequential", **EPOCHS) for name in ("fednova", "fedavg"))
    assert not torch.allclose(nova.weights, avg.weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("options", "text"), [
    ({}, "local_steps: is required; or set local_epochs in its place"),
    ({"local_steps": 2, "local_epochs": 1}, "local_steps: cannot stand beside local_epochs"),
    ({"local_epochs": 0}, "local_epochs: should be greater than 0"),
    ({"local_steps": 2, "drop_last": True}, "drop_last: is for local_epochs"),
])  # fmt: skip
def test_one_of_the_two(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PrefedError, match=text):
        prefed.simulate(prefed.FedAvg(), tiny_model(), tiny_data(), rounds=1, **options)


def test_a_change_puts_the_other_out_of_force() -> None:
    config = load("digits-noniid", ["local_epochs=2"])
    assert (config.local_steps, config.local_epochs, config.batches) == (None, 2, "epochs")
    again = load(config.to_dict())
    assert again == config
    assert load(config.to_dict(), ["local_steps=3"]).local_epochs is None


def test_clients_that_meet_in_every_step_take_equally_many() -> None:
    with pytest.raises(PrefedError, match="local_epochs: clients of PreFedSync meet in every step"):
        run("prefedsync", chain(), "sequential", **EPOCHS)
