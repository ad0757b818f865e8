"""Comparisons, sweeps, statistics, callbacks and trackers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import prefed
from prefed.experiments.config import load
from prefed.experiments.plans import plan_comparison, run_all
from prefed.experiments.ranking import group
from prefed.experiments.run_directory import execute
from prefed.experiments.stats import bootstrap_interval, sign_flip_p
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.sweep import Optuna, Scored, Space, on_edge
from prefed.experiments.toml_files import read_toml
from tests.helpers.commands import prefed_command, prefed_here
from tests.helpers.problems import tiny_data, tiny_model

SHORT = ["rounds=3", "local_steps=2", "model.hidden=[8]"]
SHORT_WORDS = [word for change in SHORT for word in ("--set", change)]


@given(st.lists(st.floats(0, 1), min_size=3, max_size=10, unique=True))
def test_bootstrap_interval_is_scipys(values: list[float]) -> None:
    """The ends of our interval cut 2.5 % off each side of scipy's bootstrap distribution, as far as
    two draws of so many agree: to 5.5 standard deviations, since many lists are tried. With few
    values that distribution has steps, so an end may lie anywhere on one."""
    low, high = bootstrap_interval(values)
    drawn = scipy.stats.bootstrap(
        (np.array(values),), np.mean, method="percentile", n_resamples=9999, rng=1
    ).bootstrap_distribution
    tiny, off = 1e-9, 5.5 * math.sqrt(2 * 0.025 * 0.975 / 9999)
    assert (drawn < low - tiny).mean() - off < 0.025 < (drawn <= low + tiny).mean() + off
    assert (drawn > high + tiny).mean() - off < 0.025 < (drawn >= high - tiny).mean() + off


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_sign_flip_p_is_scipys(differences: list[float]) -> None:
    array = np.array(differences)
    theirs = scipy.stats.permutation_test(
        (array, np.zeros_like(array)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    ).pvalue
    assert sign_flip_p(differences) == pytest.approx(theirs)


def test_sign_flip_p_with_many_pairs_is_drawn() -> None:
    differences = np.random.default_rng(0).normal(0.3, 1, 40).tolist()
    assert sign_flip_p(differences) == pytest.approx(
        scipy.stats.ttest_1samp(differences, 0).pvalue, abs=0.02
    )
    assert sign_flip_p([1.0] * 3) == 0.25


@pytest.mark.process
def test_a_comparison_is_paired_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    planned = plan_comparison("digits-noniid", ["fedavg", "prefed"], 2, SHORT, tmp_path)
    with pytest.raises(prefed.Interrupted):
        execute(planned[1].config, planned[1].folder, stop=lambda: True)
    events: list[Any] = []
    runs = run_all(planned, 2, lambda plan, event: events.append((plan.title, event)))
    assert [run.status for run in runs] == ["finished"] * 4
    assert sum("end" in event for _, event in events) == 4
    by_name = {(run.algorithm, run.seed): run for run in runs}
    for seed in (0, 1):
        a, b = by_name["fedavg", seed], by_name["prefed", seed]
        assert [r["cohort"] for r in a.history] == [r["cohort"] for r in b.history]
    events.clear()
    run_all(planned, 2, lambda plan, event: events.append(event))
    assert events == [{"end": "finished"}] * 4  # nothing is run twice


@pytest.mark.process
def test_a_diverged_run_is_shown_as_diverged(tmp_path: Path) -> None:
    changes = [*SHORT, "algorithm.client_lr=1e30"]
    good = plan_comparison("digits-noniid", ["prefed"], 2, SHORT, tmp_path / "a")
    bad = plan_comparison("digits-noniid", ["fedavg"], 2, changes, tmp_path / "c")
    groups = group(run_all([*good, *bad], 1))
    assert [g.label for g in groups] == ["prefed", "fedavg"]
    assert (groups[1].count("diverged"), groups[1].mean()) == (2, None)
    words = ["compare", "digits-noniid", "--algorithms", "fedavg", "--seeds", "2", *SHORT_WORDS]
    more = ["--set", "algorithm.client_lr=1e30", "--out", "c"]
    done = prefed_here(*words, *more, cwd=tmp_path)  # of the same runs
    assert done.returncode == 0, done.stderr
    assert "(2/2 diverged)" in done.stdout
    assert "every run diverged: lower the step sizes" in done.stderr
    assert "Diverged" in (tmp_path / "c" / "report.html").read_text()


@pytest.mark.process
def test_a_run_that_fails_is_exit_1_with_its_message(tmp_path: Path) -> None:
    """A model that cannot be built shows only when the run begins."""
    words = ["compare", "digits-noniid", "--algorithms", "fedavg", "--seeds", "1", *SHORT_WORDS]
    done = prefed_here(*words, "--set", "model=cnn", "--set", "model.channels=[8,8,8,8]",
                          "--out", "f", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "error: fedavg seed 0: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_ctrl_c_leaves_no_process_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = ["compare", "digits-noniid", "--set", "rounds=9999", "--seeds", "1", "--out", "c"]
    process = subprocess.Popen(
        [sys.executable, "-m", "prefed", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not any((tmp_path / "c").glob("*/rounds.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command with --out c goes on" in err
    deadline = time.monotonic() + 10
    while living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not living(process.pid)


def living(group: int) -> list[str]:
    """The processes of a group. One that has ended and waits to be reaped by init counts not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                found.append(path.parent.name)
    return found


@pytest.mark.process
def test_sweep_chooses_on_validation_and_tests_once(tmp_path: Path) -> None:
    words = ["sweep", "digits-noniid", *SHORT_WORDS, "--set", "algorithm=fedadam", "--out", "s",
             "--grid", "client_lr=0.001,0.1,1e30", "--grid", "server_lr=0.01,0.1",
             "--workers", "1"]  # fmt: skip
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "diverged" in done.stdout
    assert "its accuracy on the test set" in done.stdout
    points = prefed.load_runs(tmp_path / "s" / "points")
    best = prefed.load_runs(tmp_path / "s" / "best")
    assert len(points) == 6
    assert len(best) == 1
    assert all(run.config["data"]["validation"] == 0.2 for run in points)
    assert best[0].config["data"]["validation"] == 0
    # A run of the sweep never sees the test set: its split is that of fewer training samples.
    config = load(points[0].config)
    held_out = config.make_run().data.test
    assert held_out is not None
    assert len(held_out) == round(0.2 * 1437)
    assert not (tmp_path / "s" / "report").exists(), "figures are drawn on request"
    assert "over the two swept keys" in (tmp_path / "s" / "report.html").read_text(), "a heat map"
    again = prefed_here(*words, cwd=tmp_path)
    assert again.stdout.splitlines()[-4:] == done.stdout.splitlines()[-4:]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["random", pytest.param("optuna", marks=pytest.mark.slow)])
def test_random_and_optuna_sweeps(kind: str, tmp_path: Path) -> None:
    done = prefed_here(
        "sweep", "digits-iid", *SHORT_WORDS, f"--{kind}", "2", "--range", "client_lr=1e-3:1",
        "--grid", "algorithm=fedavg,fedprox", "--out", kind, "--workers", "1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = prefed.load_runs(tmp_path / kind / "points")
    rates = [run.config["algorithm"]["client_lr"] for run in runs]
    assert len(rates) == 2
    assert all(1e-3 <= rate <= 1 for rate in rates)


def test_optuna_learns_from_scores() -> None:
    """Higher step sizes score better here: later points are near the upper end."""
    suggest, tried = Optuna(Space({}, {"client_lr": (1e-4, 1.0)}), 40, 4), list[Scored]()
    while points := suggest(tried):
        assert len(points) == 4
        for point in points:
            score = math.log(float(point["client_lr"]))
            history = [{"round": 1, "train_loss": 1.0, "test_accuracy": score}]
            run = StoredRun(Path("x"), {"rounds": 1}, history, archived=True)
            tried.append(Scored(point, [run]))
    rates = [math.log10(float(scored.point["client_lr"])) for scored in tried]
    assert len(rates) == 40
    assert np.mean(rates[-10:]) > np.mean(rates[:10]) + 0.5


def test_a_best_point_on_the_edge_is_reported() -> None:
    space = Space({"client_lr": ["1", "0.1", "0.01"], "model": ["mlp", "cnn"]}, {})
    assert on_edge(space.lists, {"client_lr": "0.01", "model": "mlp"}) == ["client_lr"]
    assert on_edge(space.lists, {"client_lr": "0.1", "model": "mlp"}) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "client_lr"], "should have the form key=value"),
        ([], "--grid"),
        (["--range", "client_lr=1:0.1", "--random", "2"], "low:high"),
        (["--range", "client_lr=0.1:1"], "--range needs --random"),
        (["--grid", "cleint_lr=1,2"], 'did you mean "client_lr"?'),
    ],
)
def test_sweep_mistakes(words: list[str], message: str, tmp_path: Path) -> None:
    done = prefed_here("sweep", "digits-iid", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


class Recorder(prefed.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, config: dict[str, Any]) -> None:
        self.seen.append("start")

    def on_round(self, record: dict[str, Any]) -> None:
        self.seen.append(f"round {record['round']}")

    def on_end(self, result: prefed.Result) -> None:
        self.seen.append("end")

    def on_stop(self, reason: str) -> None:
        self.seen.append(reason)


def test_callbacks(tmp_path: Path) -> None:
    recorder = Recorder()
    prefed.simulate(
        prefed.FedAvg(), tiny_model(), tiny_data(), rounds=2, local_steps=1, callbacks=[recorder]
    )
    assert recorder.seen == ["start", "round 1", "round 2", "end"]
    stopped = Recorder()
    with pytest.raises(prefed.Interrupted):
        execute(load("digits-iid", SHORT), tmp_path, callbacks=[stopped], stop=lambda: True)
    assert stopped.seen == ["start", "round 1", "stopped after round 1"]


def test_pandas_and_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        execute(load("digits-iid", [*SHORT, f"seed={seed}"]), tmp_path / f"run{seed}")
    frame = prefed.to_pandas(tmp_path)
    assert len(frame) == 6
    assert frame.groupby("seed")["bytes_up"].sum().nunique() == 1
    assert set(frame["status"]) == {"finished"}
    listed = prefed_here("runs", ".", cwd=tmp_path)
    assert listed.stdout.count("finished") == 2


def halves(round: int) -> float:
    return 0.5**round


def test_a_function_as_a_step_size_stands_in_a_config_by_its_name(tmp_path: Path) -> None:
    name = f"{__name__}:halves"
    table = load("digits-iid", SHORT).to_dict()
    table["algorithm"] |= {"client_lr": halves}
    config = load(table)
    result = execute(config, tmp_path / "run")
    assert [record["client_lr"] for record in result.history] == [1, 0.5, 0.25]
    assert read_toml(tmp_path / "run" / "config.toml")["algorithm"]["client_lr"] == name
    again = load(str(tmp_path / "run" / "config.toml"))
    assert torch.equal(execute(again).weights, result.weights)

    table["algorithm"] |= {"client_lr": lambda round: 0.1}
    with pytest.raises(prefed.PrefedError, match=r"algorithm.client_lr: .*<lambda> cannot stand"):
        execute(load(table), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.process
def test_tensorboard_and_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    words = ["run", "digits-iid", *SHORT_WORDS, "--out", "run"]
    done = prefed_command(*words, "--track", "tensorboard", "--track", "mlflow", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test_accuracy")] == [1, 2, 3]
    metric = next((tmp_path / "mlruns").rglob("metrics/test_accuracy"))
    assert len(metric.read_text().splitlines()) == 3
    assert next((tmp_path / "mlruns").rglob("params/algorithm.client_lr")).read_text()


def test_unknown_and_missing_trackers(tmp_path: Path) -> None:
    done = prefed_here("run", "digits-iid", "--track", "tensorbord", cwd=tmp_path)
    assert done.returncode == 2
    assert "tensorboard" in done.stderr
    done = prefed_here("run", "digits-iid", "--track", "wandb", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'prefed[tracking]'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_json_lines_have_no_nan() -> None:
    from prefed.core.safe_files import to_json

    assert json.loads(to_json({"a": math.nan, "b": 1.5})) == {"a": None, "b": 1.5}


def test_random_points_are_drawn_once() -> None:
    points = Space({"client_lr": ["0.1", "0.2"], "tau": ["1", "2", "2"]}, {}).random(9)
    assert len(points) == 4 == len({*map(str, points)})
    assert len(Space({"client_lr": ["0.1"]}, {"tau": (0.1, 1.0)}).random(5)) == 5
