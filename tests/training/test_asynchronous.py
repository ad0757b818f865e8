"""Asynchronous rounds: against a NumPy event loop, against synchronous rounds, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed.core import draws
from tests.helpers.device import DEVICE
from tests.helpers.engine_runs import batchnorm, same
from tests.helpers.engine_runs import run as run_of
from tests.helpers.oracles import loss_and_grad
from tests.helpers.oracles.event_loop import EventLoop
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

ALIKE = {"steps_per_second": 10.0, "up": 1e3, "down": 2e3, "latency": 0.1}
UNLIKE = {**ALIKE, "steps_per_second": {"distribution": "lognormal", "median": 3.0, "sigma": 1.5}}
STEPS, BATCH, SEED, EVENTS = 3, 5, 3, 200

FEDBUFF = {"buffer": 2, "concurrency": 4}
FEDASYNC = {"buffer": 1, "concurrency": 4, "mix": "models", "alpha": 0.6}
HINGE = {"staleness": "hinge", "slope": 3.0, "grace": 1}
RULES: dict[str, dict[str, Any]] = {
    "fedbuff": FEDBUFF,
    "fedasync": FEDASYNC,
}
MORE_RULES: dict[str, dict[str, Any]] = {
    "fedbuff-all-in-flight": {"buffer": 3, "concurrency": 6},
    "fedbuff-hinge": {**FEDBUFF, **HINGE},
    "fedasync-hinge": {**FEDASYNC, **HINGE},
    "fedasync-constant": {**FEDASYNC, "staleness": "constant"},
    "fedasync-changes": {**FEDASYNC, "mix": "changes", "exponent": 1.0},
}


def weight_of(rule: dict[str, Any], s: int) -> float:
    """From FedAsync, section 5.2."""
    alpha = rule.get("alpha", 1.0)
    match rule.get("staleness", "polynomial"):
        case "polynomial":
            return float(alpha * (s + 1) ** -rule.get("exponent", 0.5))
        case "hinge":
            a, b = rule["slope"], rule["grace"]
            return float(alpha * (1.0 if s <= b else 1 / (a * (s - b) + 1)))
    return float(alpha)


def event_loop(name: str, run: prefed.Run, rule: dict[str, Any]) -> EventLoop:
    """The oracle for a run. The draws are the run's: whom it asks, what batches, which devices."""
    clients, n = arrays(), len(arrays())
    assert run.settings.devices is not None
    speeds = run.settings.devices.rates(SEED, 0, np.arange(n)).step  # seconds of a step
    vectors = {"fedavg": 1, "prefed": 3, "scaffold": 2}[name]
    size = 8 * len(run.server.weights) * vectors

    def gradient(w: Any, client: int, version: int, k: int) -> Any:
        x, y = clients[client]
        drawn = draws.batches(SEED, version, client, len(y), STEPS * BATCH)
        numbers = drawn.reshape(STEPS, BATCH)[k]
        return loss_and_grad(w, x[numbers], y[numbers], SIZES)[1]

    def seconds(client: int) -> float:
        computing = STEPS * float(speeds[client])
        return 0.1 + size / 2e3 + computing + 0.1 + size / 1e3

    def order(version: int) -> list[int]:
        cohort = draws.cohort(SEED, version, n, rule["concurrency"])
        places = draws.generator(SEED, "invitations", version).permutation(len(cohort))
        return [cohort[place] for place in places]

    def anyone(version: int, job: int, busy: set[int]) -> int:
        generator = draws.generator(SEED, "invited", version, job)
        if 2 * len(busy) > n:
            free = [client for client in range(n) if client not in busy]
            return free[generator.integers(len(free))]
        client = int(generator.integers(n))
        while client in busy:
            client = int(generator.integers(n))
        return client

    return EventLoop(
        name=name,
        w=run.server.weights.cpu().numpy().copy(),
        n_clients=n,
        steps=STEPS,
        lr=0.05 if name != "prefed" else 0.01,
        gradient=gradient,
        seconds=seconds,
        order=order,
        anyone=anyone,
        buffer=rule["buffer"],
        concurrency=rule["concurrency"],
        weight=lambda s: weight_of(rule, s),
        models=rule.get("mix") == "models",
        options={"beta1": 0.9, "beta2": 0.9, "tau": 1e-3},
    )


@pytest.mark.parametrize(
    "rule",
    [
        *(pytest.param(rule, id=name) for name, rule in RULES.items()),
        *(pytest.param(rule, id=n, marks=pytest.mark.slow) for n, rule in MORE_RULES.items()),
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "prefed", "scaffold"])
def test_equals_a_numpy_event_loop_over_200_events(name: str, rule: dict[str, Any]) -> None:
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=0.05 if name != "prefed" else 0.01)
    settings = prefed.Settings(
        rounds=EVENTS // rule["buffer"],
        local_steps=STEPS,
        batch_size=BATCH,
        seed=SEED,
        device=DEVICE,
        devices=UNLIKE,
        asynchronous=rule,
        evaluate_every=1000,
    )
    run = prefed.Run(algorithm, tiny_model(), tiny_data(), settings)
    expected = event_loop(name, run, rule)
    expected.run(EVENTS)
    assert len(expected.log) == settings.rounds
    assert max(record["staleness_max"] for record in expected.log) > 2
    for wanted in expected.log:
        record = run.run_round()
        assert sorted(record["cohort"]) == wanted["clients"]
        assert record["staleness_mean"] == pytest.approx(wanted["staleness_mean"], abs=1e-12)
        assert record["staleness_max"] == wanted["staleness_max"]
        assert record["seconds_virtual"] == pytest.approx(wanted["seconds_virtual"], abs=1e-9)
        found = run.server.weights.cpu().numpy()
        np.testing.assert_allclose(found, wanted["weights"], rtol=0, atol=1e-10)
    for field, value in expected.state.items():
        found = run.server.shared[field].cpu().numpy()
        np.testing.assert_allclose(found, value, rtol=0, atol=1e-10)
    for client, state in run.kept.items():
        found = state["c_i"].cpu().numpy()
        np.testing.assert_allclose(found, expected.c_of[client], rtol=0, atol=1e-10)


EQUAL = ["fedavg", "prefed", "scaffold", "fednova", "prefedlite", "fedadam"]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", EQUAL)
def test_with_equal_devices_it_is_a_synchronous_run_bit_for_bit(name: str, engine: str) -> None:
    """Buffer, clients in flight and cohort are of one size."""
    options: dict[str, Any] = {"devices": ALIKE, "weighting": "samples"}
    one = run_of(name, batchnorm(), engine, **options)
    other = run_of(name, batchnorm(), engine, **options, asynchronous={})
    same(one, other, 0)
    assert torch.equal(one.weights, other.weights)
    for a, b in zip(one.history, other.history, strict=True):
        assert b["staleness_max"] == 0
        assert {k: v for k, v in a.items() if k != "seconds"}.items() <= b.items()


LATE = {"buffer": 2, "concurrency": 4}


def late(name: str, engine: str, **options: Any) -> prefed.Result:
    settings = {"devices": UNLIKE, "asynchronous": LATE, "rounds": 15}
    return run_of(name, batchnorm(), engine, **settings | options)


def without_seconds(result: prefed.Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in result.history]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("rule", [LATE, {"buffer": 1, "concurrency": 5, "mix": "models"}])
@pytest.mark.parametrize("name", ["prefed", "scaffold"])
def test_bits_do_not_depend_on_the_number_of_workers(
    name: str, rule: dict[str, Any], engine: str
) -> None:
    one, two = (late(name, engine, asynchronous=rule, workers=n) for n in (1, 2))
    same(one, two, 0)
    assert torch.equal(one.weights, two.weights)
    assert without_seconds(one) == without_seconds(two)


@pytest.mark.parametrize("name", prefed.ALGORITHMS.names())
def test_engines_agree_for_every_algorithm(name: str) -> None:
    if name == "prefedsync":
        with pytest.raises(prefed.PrefedError, match="PreFedSync meet in every step"):
            late(name, "sequential")
        return
    same(late(name, "sequential"), late(name, "vectorised"), 1e-9)


class _Stop(prefed.Callback):
    """Stops a run after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.rounds:
            self.run.stop()


RESUMED = {
    "fedbuff": ("prefed", LATE),
    "fedasync": ("fedavg", {"buffer": 1, "concurrency": 5, "mix": "models", "alpha": 0.6}),
    "scaffold": ("scaffold", LATE),
    "codec": ("prefedlite", LATE),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(("name", "rule"), RESUMED.values(), ids=RESUMED)
def test_resumed_after_any_step_it_has_the_same_bits(
    name: str, rule: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    """Stopped after each of them in turn. Clients are lost as well."""
    devices = {**UNLIKE, "vanish": 0.2}
    options: dict[str, Any] = {"asynchronous": rule, "devices": devices, "rounds": 8}
    whole = late(name, engine, **options)
    for stop in range(1, 8):
        with pytest.raises(prefed.Interrupted):
            late(name, engine, **options, out=tmp_path, resume=True, callbacks=[_Stop(stop)])
    resumed = late(name, engine, **options, out=tmp_path, resume=True)
    assert torch.equal(whole.weights, resumed.weights)
    same(whole, resumed, 0)
    assert without_seconds(whole) == without_seconds(resumed)
    assert any("dropped" in record for record in whole.history)
