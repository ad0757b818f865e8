"""Synchronous rounds in virtual time: how long they last, who is in them, what is wasted."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prefed
from prefed import Devices, PrefedError
from prefed.training import clock as clocks
from prefed.training.clock import Clock
from prefed.training.local_trainer import LocalTrainer
from tests.helpers.engine_runs import batchnorm, chain, run, same
from tests.helpers.oracles.timed_round import Asked, timed_round
from tests.helpers.problems import CLIENT_SIZES, WITHOUT_NORMS, tiny_data, tiny_model
from tests.helpers.run_folders import small, whole_and_resumed

CONSTANT = {"steps_per_second": 100.0, "up": 1e6, "down": 4e6, "latency": 0.05}
LOGNORMAL = {"distribution": "lognormal", "median": 10.0, "sigma": 1.0}
EXPONENTIAL = {"distribution": "exponential", "mean": 1.0, "per": "job"}


def lasting(result: prefed.Result) -> list[float]:
    """The virtual seconds of each round."""
    ends = [0.0, *(r["seconds_virtual"] for r in result.history)]
    return [float(took) for took in np.diff(ends)]


@pytest.mark.parametrize("latency", [LOGNORMAL, EXPONENTIAL])
def test_devices_that_are_drawn_once_for_all_rounds_are_those_that_are_drawn_for_each(
    latency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(classes={"phone": 0.5, "edge": 0.5}, latency=latency, vanish=0.2)
    assert devices.are_constant == (latency is LOGNORMAL)

    def run() -> list[float]:
        options: Any = {"rounds": 5, "local_steps": 2, "clients_per_round": 4, "devices": devices}
        return lasting(
            prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), **options)
        )

    once = run()
    monkeypatch.setattr(clocks, "FEW", 0)
    assert run() == once


@pytest.mark.parametrize("upload", ["exact", "int8"])
def test_with_constant_devices_a_round_lasts_as_long_as_the_formula_says(upload: Any) -> None:
    result = prefed.simulate(
        prefed.PreFed(client_lr=0.01, upload=upload), tiny_model(), tiny_data(), rounds=4,
        local_steps=3, clients_per_round=4, batch_size=4, devices=CONSTANT,
    )  # fmt: skip
    for took, r in zip(lasting(result), result.history, strict=True):
        down, up = r["bytes_down"] / 4, r["bytes_up"] / 4
        assert abs(took - (0.05 + down / 4e6 + 3 / 100.0 + 0.05 + up / 1e6)) < 1e-9
        assert abs(r["device_seconds"] - 4 * took) < 1e-9
        assert r["wasted_device_seconds"] == r["wasted_bytes_up"] == r["wasted_bytes_down"] == 0


def test_with_local_epochs_the_client_with_the_most_samples_is_the_slowest() -> None:
    options = {"rounds": 2, "local_epochs": 2, "batch_size": 4, "devices": CONSTANT}
    result = prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), **options)  # type: ignore[arg-type]
    steps = 2 * math.ceil(max(CLIENT_SIZES) / 4)
    for took, r in zip(lasting(result), result.history, strict=True):
        down, up = r["bytes_down"] / 6, r["bytes_up"] / 6
        assert abs(took - (0.1 + down / 4e6 + steps / 100.0 + up / 1e6)) < 1e-9


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"local_steps": 3, "batch_size": 4}, 12),
        ({"local_steps": 3, "batch_size": None}, 3 * max(CLIENT_SIZES)),
        ({"local_epochs": 2, "batch_size": 4}, 2 * max(CLIENT_SIZES)),
        ({"local_epochs": 2, "batch_size": 4, "drop_last": True}, 2 * (max(CLIENT_SIZES) // 4 * 4)),
        ({"local_epochs": 2, "batch_size": 20, "drop_last": True}, 2 * max(CLIENT_SIZES)),
    ],
)
def test_by_samples_every_sample_of_every_batch_counts(
    options: dict[str, Any], samples: int
) -> None:
    options = options | {"devices": {"seconds_per_sample": 0.25}, "rounds": 1}
    result = prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), **options)
    assert lasting(result)[0] == pytest.approx(0.25 * samples, rel=1e-12)


def test_in_lockstep_every_step_has_a_way_there_and_back() -> None:
    result = prefed.simulate(
        prefed.PreFedSync(client_lr=0.01), tiny_model(), tiny_data(), rounds=1, local_steps=3,
        devices=CONSTANT,
    )  # fmt: skip
    r = result.history[0]
    down, up = r["bytes_down"] / 6, r["bytes_up"] / 6
    assert abs(lasting(result)[0] - (8 * 0.05 + down / 4e6 + 3 / 100 + up / 1e6)) < 1e-9


def test_the_slowest_of_n_exponential_devices_takes_the_harmonic_number() -> None:
    """Within five standard deviations of the mean of so many rounds."""
    n, rounds = len(CLIENT_SIZES), 400
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), rounds=rounds, local_steps=1,
        batch_size=1, engine="vectorised", evaluate_every=rounds,
        devices={"seconds_per_sample": EXPONENTIAL},
    )  # fmt: skip
    deviation = math.sqrt(sum(1 / i**2 for i in range(1, n + 1)) / rounds)
    assert abs(np.mean(lasting(result)) - sum(1 / i for i in range(1, n + 1))) < 5 * deviation
    many = Devices(seconds_per_sample=EXPONENTIAL)
    slowest = [many.seconds(0, job, range(50), 0, 1, 0, 1).max() for job in range(2000)]
    deviation = math.sqrt(sum(1 / i**2 for i in range(1, 51)) / 2000)
    assert abs(np.mean(slowest) - sum(1 / i for i in range(1, 51))) < 5 * deviation


# -------------------------------------------------------------------------- a round, closed


def clock(devices: Devices, **options: Any) -> tuple[Clock, prefed.Run]:
    how = {"rounds": 9, "local_steps": 7, "batch_size": 4, "devices": devices} | options
    model = prefed.Run(
        prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), prefed.Settings(**how)
    )
    assert model.clock is not None
    return model.clock, model


AMOUNT = st.floats(0.5, 50)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(AMOUNT, AMOUNT, AMOUNT, st.floats(0, 1)), min_size=6, max_size=6),
    st.sampled_from([math.inf, 2.0, 5.0, 20.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
    st.integers(1, 6),
)
def test_a_round_is_that_of_an_event_loop(
    rows: list[tuple[float, float, float, float]],
    deadline: float,
    partial: bool,
    vanish: float,
    wanted: int,
) -> None:
    """Every client with numbers of its own, from a trace; over-selection, deadline, partial work
    and clients that vanish, in all combinations."""
    partial = partial and math.isfinite(deadline)
    size = 1000.0  # amounts of bytes
    lines = [f"{c},0,{s},{u * size},{d * size},{t}" for c, (s, u, d, t) in enumerate(rows)]
    path = Path(_folder) / "trace.csv"
    path.write_text("\n".join(["client,time,steps_per_second,up,down,latency", *lines]))
    devices = Devices(
        trace=str(path), vanish=vanish, deadline=deadline if math.isfinite(deadline) else None,
        partial_work=partial, over_selection=6.0,
    )  # fmt: skip
    its, of = clock(devices, clients_per_round=wanted)
    began, cohort = its.begin(0, 10.0)
    found = its.close(of.server, began, cohort, cohort)
    up = down = of.server.weights.nbytes
    jobs = its.jobs(of.server, 0, cohort, began)
    assert (jobs.bytes_up, jobs.bytes_down) == (up, down)
    asked = [Asked(7, rows[c][0], rows[c][1] * size, rows[c][2] * size, rows[c][3]) for c in cohort]
    if vanish:  # at a moment that is uniform over the work that the client would do
        for place, a in enumerate(asked):
            limit = timed_round([a], 1, down, up, deadline, partial).taken.get(0, 7)
            took = 2 * a.latency + down / a.down + limit / a.steps_per_second + up / a.up
            lost = devices.lost(0, 0, [cohort[place]], np.array([took]))
            a.vanishes = float(lost[0])
    expected = timed_round(asked, wanted, down, up, deadline, partial)
    assert found.record["seconds_virtual"] == pytest.approx(10 + expected.lasts, abs=1e-9)
    assert found.answers == sorted(cohort[place] for place in expected.taken)
    short = {cohort[place]: k for place, k in expected.taken.items() if k < 7}
    assert found.limits == short
    assert found.record["device_seconds"] == pytest.approx(expected.device_seconds, abs=1e-9)
    assert found.record["wasted_device_seconds"] == pytest.approx(expected.wasted_seconds, abs=1e-9)
    assert abs(found.record["wasted_bytes_up"] - expected.wasted_up) <= len(cohort)  # rounding
    assert found.record["wasted_bytes_down"] == (len(cohort) - len(expected.taken)) * down


_folder = ""


@pytest.fixture(autouse=True, scope="module")
def _a_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _folder
    _folder = str(tmp_path_factory.mktemp("traces"))


def test_over_selection_takes_the_first_answers() -> None:
    devices = Devices(steps_per_second=LOGNORMAL, over_selection=1.5)
    result = run("fedavg", chain(), "vectorised", devices=devices)  # 4 of 6 clients
    for r in result.history:
        assert len(r["cohort"]) == 6
        assert len(r["dropped"]) == 2
        took = dict(zip(r["cohort"], devices.seconds(5, 0, r["cohort"], 0, 3, 0), strict=True))
        slowest = sorted(took, key=lambda c: took[c])[4:]
        assert r["dropped"] == sorted(slowest)
        assert r["wasted_device_seconds"] > 0
    fast = sorted(devices.seconds(5, 0, range(6), 0, 3, 0))[3]
    assert lasting(result) == pytest.approx([fast] * 10)


def test_clients_vanish_as_often_as_is_said() -> None:
    took = np.ones(20_000)
    lost = Devices(up=1.0, vanish=0.3).lost(0, 4, np.arange(20_000), took)
    gone = lost[np.isfinite(lost)]
    assert abs(len(gone) / 20_000 - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 20_000)
    assert abs(gone.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(gone))
    result = run("fedavg", chain(), "vectorised", devices={**CONSTANT, "vanish": 0.5}, rounds=30)
    for r in result.history:
        assert r.get("vanished", 0) == len(r.get("dropped", []))
    assert 20 < sum(r.get("vanished", 0) for r in result.history) < 100


def test_with_too_few_answers_the_model_stays_and_time_passes() -> None:
    options = {"devices": {**CONSTANT, "deadline": 0.01}, "rounds": 3}
    result = run("fedavg", chain(), "vectorised", **options)
    assert [r["skipped"] for r in result.history] == [True] * 3
    assert lasting(result) == pytest.approx([0.01] * 3)
    lost = run("fedavg", chain(), "vectorised", devices=CONSTANT, client_dropout=0.5, rounds=5)
    for r in lost.history:
        down, gone = r["bytes_down"] // 4, len(r.get("dropped", []))
        assert r["wasted_bytes_down"] == down * gone
        assert r["wasted_device_seconds"] == pytest.approx(gone * (0.05 + down / 4e6))


# ------------------------------------------------------------------------------ partial work

SLOW = {"steps_per_second": LOGNORMAL, "deadline": 0.25, "partial_work": True}
ALONE = [name for name in WITHOUT_NORMS if name != "prefedsync"]


@pytest.mark.parametrize("name", ALONE)
def test_partial_work_is_the_same_in_every_engine(name: str) -> None:
    a, b = (run(name, chain(), e, devices=SLOW) for e in ("sequential", "vectorised"))
    same(a, b, 1e-9)
    assert sum(r.get("partial", 0) for r in a.history) > 5
    assert any(r.get("local_steps", 3) != 3 for r in a.history)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": None}, {"local_steps": None, "local_epochs": 2}, {"weighting": "samples"}],
    ids=str,
)
def test_partial_work_with_other_batches(options: dict[str, Any]) -> None:
    a, b = (
        run("scaffold", chain(), e, devices=SLOW, **options) for e in ("sequential", "vectorised")
    )
    same(a, b, 1e-9)
    assert sum(r.get("partial", 0) for r in a.history) > 5


@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("statistics", ["average", "keep"])
def test_statistics_are_those_of_the_steps_that_were_made(
    statistics: Any, size: int | None
) -> None:
    a, b = (
        prefed.simulate(
            prefed.FedAvg(client_lr=0.05, statistics=statistics), batchnorm(), tiny_data(),
            rounds=4, local_steps=3, batch_size=size, engine=engine, devices=SLOW, seed=5,
        )
        for engine in ("sequential", "vectorised")
    )  # fmt: skip
    same(a, b, 1e-9)
    assert sum(r.get("partial", 0) for r in a.history) > 5


def test_a_client_that_stops_after_two_steps_sends_what_two_steps_make() -> None:
    one = prefed.FederatedData([tiny_data().client(4).all()])
    algorithm = prefed.PreFed(client_lr=0.01)
    # Time for 2.5 steps of a tenth of a second.
    late = {"steps_per_second": 10.0, "deadline": 0.25, "partial_work": True}
    options: dict[str, Any] = {"rounds": 3, "batch_size": 4, "engine": "sequential"}
    partial = prefed.simulate(algorithm, tiny_model(), one, local_steps=9, devices=late, **options)
    whole = prefed.simulate(algorithm, tiny_model(), one, local_steps=2, **options)
    assert torch.equal(partial.weights, whole.weights)
    assert [r["local_steps"] for r in partial.history] == [2, 2, 2]
    assert lasting(partial) == pytest.approx([0.2] * 3)


def test_bits_do_not_depend_on_workers() -> None:
    devices = {**SLOW, "over_selection": 1.5, "vanish": 0.2}
    for engine in ("sequential", "vectorised"):
        one, two = (run("prefed", chain(), engine, workers=n, devices=devices) for n in (1, 2))
        same(one, two, 0.0)
        assert lasting(one) == lasting(two)


def test_a_resumed_run_goes_on_at_its_virtual_time(tmp_path: Path) -> None:
    config = small(
        "prefed", "devices=phone", "devices.deadline=0.02", "devices.partial_work=true",
        "devices.over_selection=1.3", "devices.vanish=0.1",
        "devices.windows={start={distribution='uniform', low=0, high=24}, hours=6}",
    )  # fmt: skip
    whole, resumed = whole_and_resumed(config, tmp_path)
    assert torch.equal(whole.weights, resumed.weights)
    for a, b in zip(whole.history, resumed.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    assert whole.history[-1]["seconds_virtual"] > 0


# ------------------------------------------------------------------------------ availability


def test_cohorts_are_drawn_among_those_that_can_be_asked() -> None:
    """Half of the clients in the first half of each day, the others in the second."""
    path = Path(_folder) / "halves.csv"
    lines = ["client,time,on,steps_per_second", "0,0,1,0.001", "0,43200,0,"]
    path.write_text("\n".join([*lines, "1,0,0,0.001", "1,43200,1,", ""]))
    devices = {"trace": str(path), "trace_repeats": 86400.0, "up": 1e9}
    result = run("fedavg", chain(), "vectorised", devices=devices, clients_per_round=3, rounds=60)
    seen = set()
    now = 0.0
    for r in result.history:
        # A round of the first kind takes 3,000 s: who would not be done in time is lost.
        took = r["seconds_virtual"] - now
        parity = {c % 2 for c in r["cohort"]}
        assert len(parity) == 1
        assert parity == {int(now % 86400 >= 43200)}
        seen |= parity
        now += took
    assert seen == {0, 1}
    assert any(r.get("vanished") == 3 for r in result.history)


def test_windows_open_and_close_at_their_hours() -> None:
    windows = {"start": 22.0, "hours": 8.0}
    devices = Devices(up=1.0, windows=windows)
    hour = 3600.0
    for at, wait, left in (
        (0, 0, 6),
        (5.5, 0, 0.5),
        (6, 16, 0),
        (21, 1, 0),
        (22, 0, 8),
        (46, 0, 8),
    ):
        assert devices.until_on(0, at * hour, [3])[0] == pytest.approx(wait * hour)
        lost = devices.lost(0, 0, [3], np.array([9 * hour]), at * hour)[0]
        assert lost == pytest.approx(left * hour)
    assert devices.lost(0, 0, [3], np.array([5 * hour]), 0.0)[0] == math.inf


def test_the_clock_moves_on_until_there_is_a_quorum() -> None:
    devices = {**CONSTANT, "windows": {"start": 22.0, "hours": 1.0}}
    result = run("fedavg", chain(), "vectorised", devices=devices, rounds=2)
    first = result.history[0]["seconds_virtual"]
    assert 22 * 3600 < first < 22 * 3600 + 1
    path = Path(_folder) / "never.csv"
    path.write_text("client,time,on\n0,0,0\n")
    with pytest.raises(PrefedError, match="never 1 clients that can be asked"):
        run("fedavg", chain(), "vectorised", devices={"trace": str(path), "up": 1.0})


@pytest.mark.parametrize("kind", ["trace", "windows"])
def test_time_does_not_stop_where_devices_go_off(kind: str) -> None:
    """On for a part of each period, at moments that no float hits: a round in each, and no more."""
    path = Path(_folder) / "fractions.csv"
    path.write_text("client,time,on\n0,0,0\n0,0.1,1\n0,0.30000001,0\n")
    devices: dict[str, Any] = {"steps_per_second": 1e-3}  # nobody is ever done
    if kind == "trace":
        devices |= {"trace": str(path), "trace_repeats": 0.7}
    else:
        devices |= {"windows": {"start": 0.1 / 3600, "hours": 0.2 / 3600, "day": 0.7 / 3600}}
    result = run("fedavg", chain(), "vectorised", devices=devices, rounds=300)
    assert result.history[-1]["seconds_virtual"] == pytest.approx(299 * 0.7 + 0.3, abs=1e-4)


# ----------------------------------------------------------------------------------- the rest


def test_without_devices_records_are_as_they_were() -> None:
    without = run("fedavg", chain(), "sequential")
    with_clock = run("fedavg", chain(), "sequential", devices=CONSTANT)
    same(without, with_clock, 0.0)
    new = {"seconds_virtual", "device_seconds", "wasted_device_seconds", "wasted_bytes_up",
           "wasted_bytes_down"}  # fmt: skip
    for a, b in zip(without.history, with_clock.history, strict=True):
        assert {*b} - {*a} == new
        assert {**a, "seconds": 0} == {k: v for k, v in {**b, "seconds": 0}.items() if k not in new}


class Elsewhere(LocalTrainer):
    simulates = False


def test_real_clients_have_no_virtual_time(caplog: pytest.LogCaptureFixture) -> None:
    how = prefed.Settings(rounds=1, local_steps=1, batch_size=4, devices=CONSTANT)
    with caplog.at_level(logging.WARNING, "prefed"):
        result = prefed.Run(
            prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), how, make_trainer=Elsewhere
        ).run()
    assert "devices: they are of simulations" in caplog.text
    assert "seconds_virtual" not in result.history[0]


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("prefedsync", {**CONSTANT, "deadline": 1.0}, "devices.deadline: clients of PreFedS"),
        ("prefedsync", {**CONSTANT, "over_selection": 2.0}, "devices.over_selection: clients of"),
        ("fedavg", {**CONSTANT, "partial_work": True}, "partial_work: is for clients that would"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, devices: dict[str, Any], said: str) -> None:
    with pytest.raises(PrefedError, match=said):
        run(name, chain(), "sequential", devices=devices)
    with pytest.raises(PrefedError, match="over_selection: needs clients_per_round"):
        run("fedavg", chain(), "sequential", clients_per_round=None,
            devices={**CONSTANT, "over_selection": 1.3})  # fmt: skip
