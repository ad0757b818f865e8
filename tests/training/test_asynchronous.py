"""Asynchronous rounds: against a NumPy event loop, against synchronous rounds, and resumed."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed.core import draws
from prefed.training.asynchronous_trainer import AsynchronousTrainer
from prefed.training.events import Events, Population, Work
from prefed.training.local_trainer import LocalTrainer
from prefed.training.round import Server
from prefed.training.trainer import Arrived
from tests.helpers.device import DEVICE
from tests.helpers.engine_runs import batchnorm, same
from tests.helpers.engine_runs import run as run_of
from tests.helpers.oracles import loss_and_grad
from tests.helpers.oracles.event_loop import EventLoop
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model
from tests.helpers.run_folders import small, whole_and_resumed

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
"""Options, and the weighting of clients if it is not uniform."""
MORE_RULES: dict[str, dict[str, Any]] = {
    "fedbuff-all-in-flight": {"buffer": 3, "concurrency": 6},
    "fedbuff-by-samples": {**FEDBUFF, "weighting": "samples"},
    "fedbuff-take": {**FEDBUFF, "state": "take"},
    "fedbuff-ignore": {**FEDBUFF, "state": "ignore"},
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


def state_weight_of(rule: dict[str, Any], s: int) -> float:
    match rule.get("state", "mix"):
        case "take":
            return 1.0
        case "ignore":
            return 0.0 if s else 1.0
    return weight_of(rule, s)


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
        state_weight=lambda s: state_weight_of(rule, s),
        models=rule.get("mix") == "models",
        p=[float(len(y)) for _, y in clients] if "weighting" in rule else None,
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
        asynchronous={key: value for key, value in rule.items() if key != "weighting"},
        weighting=rule.get("weighting", "uniform"),
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


EQUAL = [
    *("fedavg", "prefed", "scaffold"),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("fednova", "prefedlite", "fedadam")),
]


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


BLOWN_UP = {"fedadamw", "fedlion", "fedmuon"}
"""A bias before BatchNorm has no gradient but rounding errors, of which these make whole steps."""


def late(name: str, engine: str, **options: Any) -> prefed.Result:
    settings = {"devices": UNLIKE, "asynchronous": LATE, "rounds": 15}
    model = tiny_model() if name in BLOWN_UP else batchnorm()
    return run_of(name, model, engine, **settings | options)


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
    devices = {**UNLIKE, "vanish": 0.4}
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


def test_a_step_that_fails_leaves_the_state_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has trained, and whom it has invited, are of the next try. Every other step fails."""
    options: dict[str, Any] = {"rounds": 9}
    whole = late("scaffold", "vectorised", **options)
    real, steps = LocalTrainer._train, 0

    def fails(self: LocalTrainer, server: Server, clients: list[int]) -> Arrived:
        nonlocal steps
        found, steps = real(self, server, clients), steps + 1
        if steps % 2:
            raise OSError("the disk is gone")
        return found

    monkeypatch.setattr(LocalTrainer, "_train", fails)
    for _ in whole.history:
        with pytest.raises(OSError, match="the disk is gone"):
            late("scaffold", "vectorised", **options, out=tmp_path, resume=True)
    resumed = late("scaffold", "vectorised", **options, out=tmp_path, resume=True)
    assert torch.equal(whole.weights, resumed.weights)
    assert without_seconds(whole) == without_seconds(resumed)


def test_the_mean_of_what_clients_keep_stays_what_the_server_has() -> None:
    """SCAFFOLD's c is the mean of all c_i, however old updates are."""
    result = late("scaffold", "sequential", rounds=40)
    assert max(record["staleness_max"] for record in result.history) > 2
    total = sum(state["c_i"] for state in result.kept.values())
    torch.testing.assert_close(result.server.shared["c"], total / 6, rtol=0, atol=1e-14)


def test_a_client_that_is_not_finite_is_left_out() -> None:
    """The step is then the one of the others, to the bit; so are all that come after it."""
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in arrays()]
    clients = [(x * 1e200 if c == 2 else x, y) for c, (x, y) in enumerate(pairs)]
    data = prefed.FederatedData(clients, test=clients[0])
    rule = {"buffer": 3, "concurrency": 4}
    runs = [
        late("prefed", engine, data=data, asynchronous=rule, on_divergence="continue", workers=n)
        for engine, n in (("vectorised", 1), ("vectorised", 2), ("sequential", 1))
    ]
    left = [record["round"] for record in runs[0].history if record.get("left_out") == [2]]
    assert left == [r["round"] for r in runs[0].history if 2 in r["cohort"]] != []
    assert bool(runs[0].weights.isfinite().all())
    assert torch.equal(runs[0].weights, runs[1].weights)
    same(runs[0], runs[2], 1e-9)
    with pytest.raises(prefed.Diverged):
        late("prefed", "vectorised", data=data, asynchronous=rule)


def test_bytes_are_those_of_the_messages_that_went() -> None:
    """Down to all who began, up from those that arrived. P goes up every third version only."""
    algorithm = prefed.ALGORITHMS.get("prefed")(client_lr=0.005, P_every=3)
    model = tiny_model()
    settings: dict[str, Any] = {
        "local_steps": 2,
        "batch_size": 4,
        "device": DEVICE,
        "devices": UNLIKE,
    }
    result = prefed.simulate(
        algorithm, model, tiny_data(), rounds=20, asynchronous=LATE, engine="vectorised", **settings
    )
    d = 8 * sum(p.numel() for p in model.parameters())
    # Four begin at once; then one for each that arrives, and the last of these with the next step.
    down = [record["bytes_down"] for record in result.history]
    assert down == [3 * d * n for n in (5, *[2] * 19)]
    assert {record["bytes_up"] for record in result.history} == {4 * d, 5 * d, 6 * d}
    ups = sum(record["bytes_up_weights"] for record in result.history)
    assert ups == 20 * 2 * d


def test_versions_are_held_only_while_they_are_needed() -> None:
    run = prefed.Run(
        prefed.PreFed(client_lr=0.005), tiny_model(), tiny_data(),
        prefed.Settings(
            rounds=40, local_steps=2, batch_size=4, device=DEVICE, devices=UNLIKE,
            asynchronous=LATE, engine="sequential",
        ),
    )  # fmt: skip
    most = 0
    for _ in run.rounds():
        trainer = run.trainer
        assert isinstance(trainer, AsynchronousTrainer)
        in_flight = {job.client: job.version for job in trainer.events.in_flight}
        assert not trainer.underway.held  # one client is a block
        assert {*trainer.underway.versions} == {*in_flight.values()}
        most = max(most, len(trainer.underway.versions))
    assert 2 <= most <= 4


def test_clients_are_invited_in_their_windows() -> None:
    """Each can be asked in an hour of the day of its own."""
    windows = {"start": {"distribution": "uniform", "low": 0.0, "high": 24.0}, "hours": 1.0}
    settings = prefed.Settings(
        rounds=6, local_steps=2, batch_size=4, device=DEVICE, engine="sequential",
        devices={**ALIKE, "windows": windows}, asynchronous=LATE,
    )  # fmt: skip
    run = prefed.Run(prefed.FedAvg(), tiny_model(), tiny_data(), settings)
    trainer = run.trainer
    assert isinstance(trainer, AsynchronousTrainer)
    began, devices = [], trainer.clock.devices
    for record in run.rounds():
        assert sorted(record["cohort"]) == sorted(job.client for job in trainer.filled.buffer)
        began += [(job.client, job.time - job.seconds) for job in trainer.filled.buffer]
    assert all(devices.until_on(0, time + 1e-3, [client])[0] == 0 for client, time in began)
    assert run.seconds_virtual > 3600  # the second must wait for a window


def test_when_nobody_can_ever_be_asked_it_says_so() -> None:
    def work(version: int, clients: Sequence[int], now: float) -> list[Work]:
        return [(False, 0, 1.0) for _ in clients]

    def until_on(now: float, clients: Sequence[int]) -> list[float]:
        return [0.0 if now < 5 else math.inf for _ in clients]

    events = Events(Population(0, 10, 3, 4, work, until_on))
    sizes = [len(events.fill_buffer(version).buffer) for version in range(6)]
    assert sizes[:5] == [3] * 5
    with pytest.raises(prefed.PrefedError, match="no client can ever be asked"):
        for version in range(6, 12):
            events.fill_buffer(version)


def test_when_all_are_lost_the_version_is_skipped() -> None:
    result = late("fedavg", "sequential", client_dropout=0.95, rounds=12)
    skipped = [record for record in result.history if record.get("skipped")]
    assert skipped
    assert all(record["cohort"] == [] and record["seconds_virtual"] > 0 for record in skipped)
    assert all(len(record["cohort"]) <= 2 for record in result.history)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no devices": ({"devices": None}, "asynchronous: needs devices"),
    "buffer": ({"asynchronous": {"buffer": 7}}, r"asynchronous.buffer: 7 is more than the 6"),
    "places": ({"asynchronous": {"concurrency": 7}}, r"asynchronous.concurrency: 7 is more than"),
    "quorum": ({"quorum": 3, "asynchronous": LATE}, "quorum: 3 is more than the 2 of a buffer"),
    "deadline": ({"devices": {**ALIKE, "deadline": 3.0}}, "devices.deadline: is of synchronous"),
    "word": ({"asynchronous": {"stalenes": "hinge"}}, "did you mean .staleness"),
    "alpha": ({"asynchronous": {"alpha": 1.5}}, r"asynchronous.alpha: should be .*1"),
}


@pytest.mark.parametrize(("options", "text"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(prefed.PrefedError, match=text):
        late("fedavg", "sequential", **options)


def test_ranks_and_nodes_are_refused() -> None:
    """Whoever trains clients elsewhere has a trainer that is not asynchronous."""
    settings = prefed.Settings(rounds=1, local_steps=1, devices=ALIKE, asynchronous={})
    with pytest.raises(prefed.PrefedError, match="asynchronous: is for simulations"):
        prefed.Run(prefed.FedAvg(), tiny_model(), tiny_data(), settings, make_trainer=LocalTrainer)


def test_the_weight_of_an_old_update() -> None:
    weights = {
        "polynomial": [1.0, 2**-0.5, 3**-0.5, 0.5],
        "hinge": [1.0, 1.0, 1 / 11, 1 / 21],
        "constant": [1.0] * 4,
    }
    for staleness, expected in weights.items():
        rule = prefed.Asynchronous(staleness=staleness, alpha=0.5, grace=1)
        assert [rule.weight(s) for s in range(4)] == pytest.approx([w / 2 for w in expected])
    with pytest.raises(prefed.PrefedError, match=r"Asynchronous.buffer: should be greater than 0"):
        prefed.Asynchronous(buffer=0)


def test_a_config_says_it_too(tmp_path: Path) -> None:
    changes = ["devices=phone", "asynchronous.buffer=2", "asynchronous.concurrency=5"]
    config = small("prefed", *changes)
    whole, resumed = whole_and_resumed(config, tmp_path)
    assert torch.equal(whole.weights, resumed.weights)
    table = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())
    assert table["asynchronous"]["buffer"] == 2
    assert "asynchronous" not in small("prefed").to_dict()
    assert all(len(record["cohort"]) == 2 for record in whole.history)


def test_a_run_that_is_given_more_rounds_is_the_longer_one(tmp_path: Path) -> None:
    whole = late("prefed", "vectorised", rounds=9)
    late("prefed", "vectorised", rounds=4, out=tmp_path)
    longer = late("prefed", "vectorised", rounds=9, out=tmp_path, resume=True)
    assert torch.equal(whole.weights, longer.weights)
    assert without_seconds(whole) == without_seconds(longer)
