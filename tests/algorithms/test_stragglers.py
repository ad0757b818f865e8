"""Stragglers: a share of each cohort that does a part of its work or none, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import prefed
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.experiments.config import load
from prefed.training.stragglers import check
from tests.algorithms.test_oracles import CASES, EPOCHS, close, known_to_oracle, passes
from tests.helpers import oracles
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

ROUNDS, BATCH, WORK, SEED, SHARE = 4, 5, 4, 3, 0.5
COHORT = 4
"""Of six clients; two of the four are slow."""


def slow(cohort: list[int], round: int) -> list[int]:
    """The definition: half of the cohort, each subset with the same chance."""
    drawn = draws.generator(SEED, "stragglers", round)
    return [cohort[i] for i in drawn.choice(len(cohort), len(cohort) // 2, replace=False)]


def done(round: int, client: int) -> int:
    """The definition: 1 to all of the work, each number with the same chance."""
    return 1 + int(draws.generator(SEED, "straggler work", round, client).integers(WORK))


@pytest.mark.parametrize("name", EPOCHS)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("unit", ["local_steps", "local_epochs"])
def test_stragglers_do_a_part(name: str, engine: str, unit: str) -> None:
    for options in (CASES[name][0], CASES[name][-1]):
        options = {"client_lr": 0.01, **options}
        algorithm = prefed.ALGORITHMS.get(name)(**options)
        how: dict[str, Any] = {unit: WORK, "batches": "epochs"}
        settings = prefed.Settings(
            rounds=ROUNDS, clients_per_round=COHORT, batch_size=BATCH, seed=SEED, engine=engine,
            weighting="samples", device="cpu", stragglers=SHARE, **how,
        )  # fmt: skip
        run = prefed.Run(algorithm, tiny_model(), tiny_data(), settings)
        start = run.server.weights.numpy().copy()
        records = [run.run_round() for _ in range(ROUNDS)]
        clients, cohorts = arrays(), [record["cohort"] for record in records]
        late = [slow(cohort, round) for round, cohort in enumerate(cohorts)]
        assert [record["partial"] for record in records] == [2] * ROUNDS

        def batches(
            round: int, client: int, unit: str = unit, late: list[list[int]] = late
        ) -> list[Any]:
            samples = len(arrays()[client][0])
            part = done(round, client) if client in late[round] else WORK
            if unit == "local_epochs":
                whole = passes(round, client, samples, BATCH, WORK)
                return whole[: len(whole) * part // WORK]
            drawn = draws.epochs(SEED, round, client, samples, WORK * BATCH)
            return [*drawn.reshape(WORK, BATCH)[:part]]

        more = {"server_lr": algorithm.server_lr, **options, **known_to_oracle(name, SEED)}
        expected = oracles.run(
            name, more, lambda w, x, y: oracles.loss_and_grad(w, x, y, SIZES), start, clients,
            cohorts, None, batches=batches, weighting="samples", n_clients=len(clients),
        )  # fmt: skip
        tolerance = 1e-10 if options.get("refresh", 1) == 1 else 1e-8
        close(run.server.weights, expected.weights[-1], tolerance)
        losses = [record["train_loss"] for record in records]
        np.testing.assert_allclose(losses, expected.train_loss, rtol=tolerance, atol=tolerance)
        for round, record in enumerate(records):
            weights = [len(clients[client][0]) for client in record["cohort"]]
            taken = [len(batches(round, client)) for client in record["cohort"]]
            mean = np.average(taken, weights=weights)
            assert record["local_steps"] == pytest.approx(mean)


def simulate(algorithm: prefed.Algorithm, **settings: Any) -> prefed.Result:
    options = {"rounds": ROUNDS, "clients_per_round": COHORT, "local_epochs": 2, "seed": SEED}
    return prefed.simulate(algorithm, tiny_model(), tiny_data(), **options | settings)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "prefed", "prefedsync"])
def test_stragglers_are_left_out(name: str) -> None:
    """The same as a run whose cohorts are the rest."""
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=0.05)
    how: dict[str, Any] = {"local_epochs": None, "local_steps": 3}
    result = simulate(algorithm, stragglers=SHARE, straggler_work="drop", **how)
    settings = prefed.Settings(rounds=ROUNDS, clients_per_round=COHORT, seed=SEED, local_steps=3)
    run = prefed.Run(algorithm, tiny_model(), tiny_data(), settings)
    for round, record in enumerate(result.history):
        late = slow(record["cohort"], round)
        assert record["dropped"] == sorted(late)
        assert "partial" not in record
        rest = [client for client in record["cohort"] if client not in late]
        run.draw_cohort = lambda rest=rest: rest  # type: ignore[method-assign,misc]
        run.run_round()
        assert 2 * record["bytes_up"] == record["bytes_down"]
    assert (run.server.weights == result.weights).all()


def test_who_is_slow_depends_on_nothing_else() -> None:
    """Neither the algorithm, nor workers, nor what becomes of them; FedAvg without them and
    FedProx with their part of the work see the same stragglers."""
    one = simulate(prefed.FedAvg(client_lr=0.1), stragglers=0.5, workers=1, engine="vectorised")
    two = simulate(prefed.FedAvg(client_lr=0.1), stragglers=0.5, workers=2, engine="vectorised")
    assert (one.weights == two.weights).all()
    none = simulate(prefed.FedAvg(client_lr=0.1))
    few = simulate(prefed.FedAvg(client_lr=0.1), stragglers=0.1)  # less than half a client
    assert (none.weights == few.weights).all()
    assert (none.weights != one.weights).any()
    assert [r["cohort"] for r in none.history] == [r["cohort"] for r in one.history]


def test_configs_that_do_not_use_it_are_as_before() -> None:
    table = load("digits-iid").to_dict()
    assert not {"stragglers", "straggler_work", "objective"} & table.keys()
    table = load("digits-iid", ["stragglers=0.5"]).to_dict()
    assert table["straggler_work"] == "partial"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"devices": "phone"}, "stragglers: cannot stand beside devices"),
        ({"privacy": {"epsilon": 4.0}}, "leave one of them out"),
        ({"stragglers": 1.0}, "stragglers: should be less than 1"),
    ],
)
def test_what_it_does_not_go_with(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(PrefedError, match=text):
        simulate(prefed.FedAvg(client_lr=0.1), **{"stragglers": 0.5, **settings})


def test_clients_in_lockstep_cannot_stop_early() -> None:
    how: dict[str, Any] = {"local_epochs": None, "local_steps": 3}
    with pytest.raises(PrefedError, match='set straggler_work = "drop"'):
        simulate(prefed.PreFedSync(client_lr=0.1), stragglers=0.5, **how)


def test_nodes_are_slow_by_themselves() -> None:
    settings = prefed.Settings(rounds=1, local_steps=1, stragglers=0.5)
    with pytest.raises(PrefedError, match="they are of simulations"):
        check(settings, lockstep=False, simulates=False)
