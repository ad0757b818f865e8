"""Clients that stop after fewer local steps, against NumPy: every algorithm, by a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefed
from prefed.core import draws
from tests.algorithms.test_oracles import CASES, EPOCHS, close, known_to_oracle
from tests.helpers import oracles
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

STEPS, BATCH, ROUNDS, SEED = 5, 4, 4, 3
TAKEN = [5, 2, 5, 1, 3, 4]
"""The steps of each client: its speed is such that it has time for half a step more."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("trace") / "speeds.csv"
    lines = [f"{client},0,{taken + 0.5}" for client, taken in enumerate(TAKEN)]
    path.write_text("\n".join(["client,time,steps_per_second", *lines]))
    return str(path)


@pytest.mark.parametrize("name", EPOCHS)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_partial_work(name: str, engine: str, trace: str) -> None:
    for options in (CASES[name][0], CASES[name][-1]):
        options = {"client_lr": 0.05, **options}
        algorithm = prefed.ALGORITHMS.get(name)(**options)
        settings = prefed.Settings(
            rounds=ROUNDS, clients_per_round=4, local_steps=STEPS, batch_size=BATCH, seed=SEED,
            weighting="samples", engine=engine, device="cpu",
            devices={"trace": trace, "deadline": 1.0, "partial_work": True},
        )  # fmt: skip
        run = prefed.Run(algorithm, tiny_model(), tiny_data(), settings)
        start = run.server.weights.numpy().copy()
        records = [run.run_round() for _ in range(ROUNDS)]
        clients, cohorts = arrays(), [record["cohort"] for record in records]
        assert sum(record["partial"] for record in records) > ROUNDS

        def batches(round: int, client: int) -> list[Any]:
            samples = len(arrays()[client][0])
            drawn = draws.batches(SEED, round, client, samples, STEPS * BATCH)
            return [*drawn.reshape(STEPS, BATCH)[: TAKEN[client]]]

        more = {"server_lr": algorithm.server_lr, **options, **known_to_oracle(name, SEED)}
        expected = oracles.run(
            name, more, lambda w, x, y: oracles.loss_and_grad(w, x, y, SIZES), start, clients,
            cohorts, None, batches=batches, weighting="samples", n_clients=len(clients),
        )  # fmt: skip
        tolerance = 1e-10 if options.get("refresh", 1) == 1 else 1e-8
        close(run.server.weights, expected.weights[-1], tolerance)
        losses = [record["train_loss"] for record in records]
        np.testing.assert_allclose(losses, expected.train_loss, rtol=tolerance, atol=tolerance)
        for field, value in (run.server.shared | run.server.optimiser).items():
            theirs = expected.shared[-1] | expected.server[-1]
            if field in theirs:
                close(value, theirs[field], tolerance)
        sizes = [len(x) for x, _ in clients]
        for record in records:
            weights = [sizes[client] for client in record["cohort"]]
            mean = np.average([TAKEN[client] for client in record["cohort"]], weights=weights)
            assert record["local_steps"] == pytest.approx(mean)
        slowest = [max(TAKEN[c] / (TAKEN[c] + 0.5) for c in cohort) for cohort in cohorts]
        ends = [record["seconds_virtual"] for record in records]
        np.testing.assert_allclose(ends, np.cumsum(slowest), rtol=1e-12)
