"""State that clients keep between two averages (DES-LOC): who begins with what, what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed import Pair, average, keep
from prefed.experiments.config import load
from prefed.rules import Adam
from prefed.training.engines.vectorised import Vectorised
from prefed.training.server_state import LAST
from tests.helpers import oracles
from tests.helpers.engine_runs import chain, same
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

ROUNDS, STEPS = 13, 2
ADAM = Adam(bias_correction=True)


def run(algorithm: prefed.Algorithm, **options: Any) -> prefed.Run:
    settings: dict[str, Any] = {
        "rounds": ROUNDS, "local_steps": STEPS, "clients_per_round": 2, "batch_size": None,
        "seed": 5, "engine": "sequential", "device": "cpu",
    } | options  # fmt: skip
    made = prefed.Run(algorithm, tiny_model(), tiny_data(), prefed.Settings(**settings))
    for _ in made.rounds():
        pass
    return made


def share(m: int, v: int) -> dict[str, Any]:
    return {
        name: {"kind": "average", "every": every, "between": "keep"}
        for name, every in (("m", m), ("v", v))
    }


def test_clients_that_skip_rounds_equal_the_oracle() -> None:
    """Two of six clients in a round: of those that begin a round, some were at the last average,
    some only before it, some never, and some have gone on by themselves since."""
    pair = Pair(client_lr=0.05, client=ADAM, share=share(2, 4))
    made = run(pair)
    cohorts = [record["cohort"] for record in made.history]
    last: dict[int, int] = {}
    begun = set()
    for t, cohort in enumerate(cohorts):
        due = 4 * (t // 4)  # the first round after the newest average of v
        for client in cohort:
            was = last.get(client, -1)
            there = due > 0 and client in cohorts[due - 1]
            begun.add("new" if was < 0 else "own" if was >= due else "was" if there else "stale")
            last[client] = t
    assert begun == {"new", "own", "was", "stale"}
    start = torch.nn.utils.parameters_to_vector(tiny_model().parameters()).detach().numpy()
    options = {"client_lr": 0.05, "share": share(2, 4)}
    trace = oracles.run(
        "pair", options | {"client": {"name": "adam", "bias_correction": True}},
        lambda w, x, y: oracles.loss_and_grad(w, x, y, SIZES),
        start, arrays(), cohorts, STEPS, n_clients=6,
    )  # fmt: skip
    np.testing.assert_allclose(made.server.weights, trace.weights[-1], rtol=1e-10, atol=1e-10)
    for name, value in made.server.shared.items():
        np.testing.assert_allclose(value, np.broadcast_to(trace.shared[-1][name], value.shape),
                                   rtol=1e-10, atol=1e-10)  # fmt: skip
    kept = made.trainer.state()
    assert kept["kept.clients"].tolist() == sorted(trace.kept[-1])
    assert kept[f"kept.{LAST}"].tolist() == [last[c] for c in sorted(last)]


@pytest.mark.parametrize(("every", "other"), [(1, average()), (1000, keep())], ids=str)
def test_the_ends_are_average_and_keep(every: int, other: prefed.algorithms.Policy) -> None:
    policy = average(every=every, between="keep")
    one, two = (
        run(Pair(client_lr=0.05, client=ADAM, share={"m": p, "v": p})) for p in (policy, other)
    )
    assert torch.equal(one.server.weights, two.server.weights)


def test_bytes_are_exact() -> None:
    """m goes up in every second round, v in every fourth; both come down in each."""
    pair = Pair(client_lr=0.05, client=Adam(), share=share(2, 4))
    made = run(pair)
    d = made.server.weights.nbytes
    for t, record in enumerate(made.history):
        sent = ((t + 1) % 2 == 0) + ((t + 1) % 4 == 0)
        assert record["bytes_up_state"] == 2 * d * sent
        assert record["bytes_down_state"] == 2 * d * 2


def test_engines_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vectorised, "most_clients", 2)
    pair = Pair(client_lr=0.01, client=ADAM, share=share(2, 3), personal=())
    options: dict[str, Any] = {"rounds": 8, "local_steps": 2, "clients_per_round": 3,
                               "batch_size": 4, "device": "cpu"}  # fmt: skip
    found = {
        (engine, workers): prefed.simulate(
            pair, chain(), tiny_data(), engine=engine, workers=workers, **options
        )
        for engine in ("sequential", "vectorised")
        for workers in (1, 2)
    }
    same(found["sequential", 1], found["vectorised", 1], 1e-9)
    for engine in ("sequential", "vectorised"):
        same(found[engine, 1], found[engine, 2], 0.0)


@pytest.mark.parametrize("every", [1, 1000])
def test_beside_personal_parts(every: int) -> None:
    """Of what stays with a client for good, the policy changes nothing."""
    policy = average(every=every, between="keep")
    one, two = (
        run(Pair(client_lr=0.05, client=Adam(), share={"m": p, "v": p}, personal=("@last",)))
        for p in (policy, average() if every == 1 else keep())
    )
    assert torch.equal(one.server.weights, two.server.weights)
    kept = one.trainer.state()
    size = one.server.weights.numel()
    assert kept["kept.m"].shape[1] == size
    assert kept["kept.personal.m"].shape[1] == one.server.personal.numel() > 0


def test_options_that_are_not_used_are_not_written(tmp_path: Path) -> None:
    written = Pair(client="adam", share={"m": "average"}).model_dump()["share"]["m"]
    assert written == {"kind": "average", "follow": "mean", "codec": "exact", "every": 1}
    used = Pair(client="adam", share=share(3, 6))
    assert used.model_dump()["share"]["m"]["between"] == "keep"
    assert Pair(**used.model_dump()) == used
    table = "share={m={kind='average', every=3, between='keep'}}"
    changes = ["algorithm=pair", "algorithm.client=adam", f"algorithm.{table}"]
    config = load("digits-iid", changes)
    assert config.make_algorithm().sharing()["m"] == average(every=3, between="keep")
    assert load(config.to_dict()) == config


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(prefed.PrefedError, match=r"m: between = \"keep\" is for kind = \"average"):
        Pair(client="adam", share={"m": {"kind": "keep", "between": "keep"}})
    with pytest.raises(prefed.PrefedError, match=r"share\.m\.between: should be 'server' or 'keep"):
        Pair(client="adam", share={"m": {"kind": "average", "between": "reset"}})
