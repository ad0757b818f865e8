"""Trackers of comparisons, sweeps and studies, with the real packages: each run one of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefed.core.errors import PrefedError
from prefed.experiments.trackers import Tracking
from tests.helpers.commands import prefed_here

SHORT = ["rounds=2", "local_steps=2", "model.hidden=[8]", "engine=sequential"]
WORDS = [word for change in SHORT for word in ("--set", change)]

STUDY = """
title = "small"
config = "digits-iid"
set = ["rounds=2", "local_steps=2", "model.hidden=[8]"]
seeds = 1
[grid.fedavg]
client_lr = [0.1, 0.3]
"""


def steps(folder: Path) -> dict[str, list[int]]:
    """The rounds that TensorBoard's own reader finds, by run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in folder.rglob("events.out.*"):
        events = EventAccumulator(str(file.parent))
        events.Reload()
        name = file.parent.relative_to(folder).as_posix()
        found[name] = [event.step for event in events.Scalars("train_loss")]
    return found


@pytest.mark.process
def test_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    words = ["compare", "digits-iid", "--algorithms", "fedavg,prefed", "--seeds", "1", *WORDS]
    words += ["--out", "cmp", "--workers", "1", "--track", "tensorboard", "--track", "mlflow"]
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = {"fedavg-seed0", "prefed-seed0"}
    assert steps(tmp_path / "cmp" / "tensorboard") == {run: [1, 2] for run in runs}
    stored = [file.parent.parent for file in tmp_path.rglob("tags/group")]
    assert {(run / "tags" / "mlflow.runName").read_text() for run in stored} == runs
    assert {(run / "tags" / "group").read_text() for run in stored} == {"cmp"}
    for run in stored:
        assert len((run / "metrics" / "test_accuracy").read_text().splitlines()) == 2

    done = prefed_here(*words, cwd=tmp_path)  # what is finished is not tracked again
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.rglob("tags/group")]) == 2


@pytest.mark.process
def test_a_sweep_and_a_study(tmp_path: Path) -> None:
    words = ["sweep", "digits-iid", *WORDS, "--grid", "client_lr=0.01,0.02", "--out", "sw"]
    done = prefed_here(*words, "--workers", "1", "--track", "tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = steps(tmp_path / "sw" / "tensorboard")
    points = {f"points/client_lr={lr},seed=0" for lr in ("0.01", "0.02")}
    assert points < found.keys()
    assert len([name for name in found if name.startswith("best/")]) == 1

    (tmp_path / "small.toml").write_text(STUDY)
    words = ["study", "small.toml", "--out", "st", "--workers", "1", "--track", "tensorboard"]
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = steps(tmp_path / "st" / "tensorboard")
    tuning = {f"tuning-fedavg-client-lr-{lr}-seed-1000" for lr in ("0.1", "0.3")}
    assert found == {run: [1, 2] for run in (*tuning, "digits-iid/FedAvg-seed0")}


def test_unknown_and_missing_trackers_are_named_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(PrefedError, match="unknown tracker; did you mean"):
        Tracking(["tensorbord"], tmp_path)
    for command in (["compare"], ["sweep", "--grid", "client_lr=1"], ["study"]):
        words = [command[0], "digits-iid", *command[1:], "--out", "o", "--track", "tensorbord"]
        done = prefed_here(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert 'did you mean "tensorboard"' in done.stderr
        assert not list(tmp_path.rglob("config.toml"))
