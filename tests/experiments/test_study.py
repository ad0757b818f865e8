"""Studies: equal budgets, tuned on a validation split, compared with paired seeds, resumed."""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tomli_w
from matplotlib.figure import Figure

import prefed.report.study_results as results
from prefed.cli.study_command import study as study_command
from prefed.core.errors import PrefedError
from prefed.core.safe_files import lock
from prefed.experiments.config import load
from prefed.experiments.measures import ACCURACY
from prefed.experiments.stats import student, student_interval
from prefed.experiments.stored_runs import (
    ARCHIVE,
    StoredRun,
    load_archive,
    load_runs,
    write_archive,
)
from prefed.experiments.study import merged, read
from prefed.experiments.study_runs import StudyRuns, key
from prefed.experiments.toml_files import studies
from prefed.report.figures import to_bytes
from prefed.report.study_results import _columns_in_time
from tests.helpers import ROOT
from tests.helpers.commands import prefed_here

TABLE: dict[str, Any] = {
    "title": "small",
    "seeds": 2,
    "reference": "PreFed",
    "tuning": {"rounds": 2},
    "grid": {
        "fedavg": {"client_lr": [0.1, 0.3]},
        "prefed": {"client_lr.start": [0.01, 1e30]},
    },
    "variants": {
        "PreFed, m reset": {"like": "prefed", "momentum": "reset"},
        "Lite / \u00fc": {"like": "prefed", "name": "prefedlite"},
    },
}

FEW: dict[str, Any] = {"seeds": 1, "variants": {}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path, {})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a study with few runs has written."""
    folder = tmp_path_factory.mktemp("finished")
    study_command(str(written(folder, FEW)), folder / "out", workers=1)
    return folder / "out"


def written(folder: Path, changes: dict[str, Any]) -> Path:
    config = tomllib.loads(tomli_w.dumps(load("digits-iid", ["rounds=4"]).to_dict()))
    config |= {
        "local_steps": 2,
        "clients_per_round": 3,
        "evaluate_every": 1,
        "engine": "sequential",
    }
    config["data"]["split"]["clients"] = 10
    config["model"] = {"name": "mlp", "hidden": [8]}
    config["algorithm"] = {"name": "prefed"}
    config["tuned"] = {"prefed": {"client_lr": {"schedule": "cosine", "start": 0.02}, "tau": 0.01}}
    (folder / "quick.toml").write_text(tomli_w.dumps(config))
    return write(folder, changes)


def write(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps({**TABLE, "config": str(folder / "quick.toml"), **changes}))
    return path


@pytest.mark.process
def test_a_study_from_the_command_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    done = prefed_here("study", str(source), "--out", str(out), "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = json.loads((out / "quick" / "tuning.json").read_text())["scores"]
    assert len(scores) == 4
    assert scores["prefed client_lr.start=1e+30 seed=1000"] is None  # it diverged
    tuned = tomllib.loads((out / "quick" / "tuned.toml").read_text())["tuned"]
    assert tuned["prefed"] == {"client_lr": {"schedule": "cosine", "start": 0.01}, "tau": 0.01}
    best = max((0.1, 0.3), key=lambda lr: scores[f"fedavg client_lr={lr} seed=1000"])
    assert tuned["fedavg"] == {"client_lr": best}

    written = json.loads((out / "small.json").read_text())
    rows = {row["label"]: row for row in written["lines"]}
    assert set(rows) == {"FedAvg", "PreFed", "PreFed, m reset", "Lite / \u00fc"}
    assert rows["PreFed"]["vectors_up"] == 3
    assert rows["PreFed, m reset"]["vectors_up"] == 2
    assert rows["PreFed, m reset"]["algorithm"]["tau"] == 0.01
    paired = [rows["FedAvg"]["values"][s] - rows["PreFed"]["values"][s] for s in "01"]
    assert rows["FedAvg"]["difference"] == pytest.approx(sum(paired) / 2)
    assert written["at_the_edge"] == {}  # of two values each is an end
    assert (out / "small.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "small.md").read_text()
    for line in (line for line in table.splitlines() if "---" not in line):
        cells = " ".join(line.replace("|", " ").split())
        assert cells in " ".join(done.stdout.split())

    # Everything again: nothing is run, and the numbers are the same.
    (out / "small.md").unlink()
    study_command(str(source), out)
    assert capsys.readouterr().out.count(": known") == 12
    assert (out / "small.md").read_text() == table

    # The comparison is one file now, and enough to draw from; `load_runs` finds its runs.
    assert [p.name for p in sorted((out / "quick").iterdir()) if p.name != ".lock"] == [
        "runs.jsonl.xz", "tuned.toml", "tuning.json"
    ]  # fmt: skip
    runs = load_runs(out)
    assert [run.folder.name for run in runs] == sorted(load_archive(out / "quick"))
    assert [run.status for run in runs] == ["finished"] * 8
    (out / "small.md").unlink()
    study_command(str(source), out, draw=True)
    assert (out / "small.md").read_text() == table


@pytest.mark.process
def test_an_algorithm_is_run_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its grid was changed, say. All else stays, and numbers are the same."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    source = written(tmp_path, FEW)
    table = (out / "small.md").read_text()
    study_command(str(source), out, workers=1, again="prefed")
    assert capsys.readouterr().out.count(": known") == 3  # fedavg's
    assert (out / "small.md").read_text() == table
    with pytest.raises(PrefedError, match='--again: the study has no prefd; did you mean "prefed"'):
        study_command(str(source), out, workers=1, again="prefd")

    changed = {**FEW, "grid": {**TABLE["grid"], "prefed": {"client_lr.start": [0.03, 0.04]}}}
    source = written(tmp_path, changed)
    with pytest.raises(PrefedError, match="choose another --out, or --again"):
        study_command(str(source), out, workers=1)
    study_command(str(source), out, workers=1, again="prefed")
    scores = json.loads((out / "quick" / "tuning.json").read_text())["scores"]
    assert {k.split()[1] for k in scores if k.startswith("prefed ")} == {
        "client_lr.start=0.03", "client_lr.start=0.04"
    }  # fmt: skip


@pytest.mark.process
def test_runs_in_directories_go_into_the_archive(
    source: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directories of an earlier version, without models, are drawn from, not run again, and moved
    into the archive beside the runs of other studies; an interrupted run stays and goes on."""
    write(tmp_path, FEW)
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    table, folder = (out / "small.md").read_text(), out / "quick"
    packed = (folder / ARCHIVE).read_bytes()
    archived = load_archive(folder)
    (folder / ARCHIVE).unlink()
    for run in archived.values():
        run.folder.mkdir()
        (run.folder / "config.toml").write_text(tomli_w.dumps(run.config))
        (run.folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in run.history))
        (run.folder / "environment.json").write_text(json.dumps(run.environment))
    study_command(str(source), out, draw=True)
    assert (out / "small.md").read_text() == table
    assert [run.archived for run in load_runs(out)] == [False] * 2

    other = replace(archived["FedAvg-seed0"], folder=folder / "Other-seed0")
    write_archive(folder, [other])
    capsys.readouterr()
    study_command(str(source), out, workers=1)
    assert capsys.readouterr().out.count(": known") == 6
    assert [p for p in folder.iterdir() if p.is_dir()] == []
    assert load_archive(folder) == {**archived, "Other-seed0": other}
    write_archive(folder, reversed(archived.values()))
    assert (folder / ARCHIVE).read_bytes() == packed

    # Killed after the archive was written and before the directory was removed.
    again = folder / "FedAvg-seed0"
    again.mkdir()
    (again / "config.toml").write_text(tomli_w.dumps(archived[again.name].config))
    assert len(load_runs(out)) == 2
    with lock(folder), pytest.raises(PrefedError, match="another process"):
        study_command(str(source), out, workers=1)
    with lock(again), pytest.raises(PrefedError, match="another process"):
        study_command(str(source), out, workers=1)
    study_command(str(source), out, workers=1)
    assert not again.exists()

    archived[again.name].config["engine"] = "compiled"  # the same run up to rounding
    write_archive(folder, archived.values())
    scores = json.loads((folder / "tuning.json").read_text())
    scores["config"]["engine"] = "compiled"
    (folder / "tuning.json").write_text(json.dumps(scores))
    study_command(str(source), out, workers=1)

    archived[again.name].config["batch_size"] += 1
    write_archive(folder, archived.values())
    with pytest.raises(PrefedError, match="FedAvg-seed0: holds a run of another config"):
        study_command(str(source), out, workers=1)


RECORD = {"round": 1, "train_loss": 1.0, "bytes_up": 1, "bytes_down": 1, "seconds": 0.1}
RUN = {
    "run": "a",
    "config": {"algorithm": {"name": "fedavg"}, "rounds": 1, "dropout": 0.5},
    "records": [RECORD],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "../a"}, "name of a directory"),
        ({"run": ".."}, "name of a directory"),
        ({"run": ""}, "name of a directory"),
        ({"run": 1}, "name of a directory"),
        ({"run": "first"}, "twice"),
        ({"config": []}, "names no algorithm"),
        ({"config": 1}, "not a run"),
        ({"config": {"rounds": 1}}, "names no algorithm"),
        ({"config": {"algorithm": {"name": "fedavg"}, "rounds": "1"}}, "whole numbers"),
        ({"config": {"algorithm": {"name": "fedavg"}, "rounds": 2}}, "has not ended"),
        ({"records": []}, "has not ended"),
        ({"records": [1]}, "not a run"),
        ({"records": [{**RECORD, "seconds": None}]}, "not a run"),
        ({"records": 1}, "not a run"),
    ],
)
def test_archives_are_checked_before_use(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    lines = [{**RUN, "run": "first"}, {**RUN, **changes}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / ARCHIVE).write_bytes(lzma.compress(text.encode()))
    with pytest.raises(PrefedError, match=rf"runs\.jsonl\.xz:2: .*{message}"):
        load_runs(tmp_path)


@pytest.mark.long
def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / ARCHIVE
    whole = lzma.compress((json.dumps(RUN) + "\n").encode())
    path.write_bytes(whole)
    (run,) = load_runs(tmp_path)
    assert (run.folder, run.status) == (tmp_path / "a", "finished")
    assert run.config["client_dropout"] == 0.5  # it was called dropout
    wrong = [b"", b"x", whole[:-9], whole + b"x", whole[:40] + b"xyz" + whole[43:]]
    wrong += [lzma.compress(text) for text in (b"[" * 10**4, b"\xff", b"1\n", bytes(10**8))]
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(PrefedError, match=r"runs\.jsonl\.xz"):
            load_runs(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(PrefedError, match="not a file"):
        load_runs(tmp_path)


@pytest.mark.process
def test_a_study_that_is_stopped_goes_on(
    source: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends in the same table as one that was not stopped."""
    write(tmp_path, FEW)
    capsys.readouterr()

    for looks in (3, 9):  # at the clock, before the time is over: in the tuning, in a run
        clock = iter([0.0] * looks)
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock, 1e6))
        study_command(str(source), tmp_path / "cut", minutes=1, workers=1)
        monkeypatch.undo()
        assert "the same command goes on" in capsys.readouterr().out
    study_command(str(source), tmp_path / "cut", workers=1)
    assert "the same command goes on" not in capsys.readouterr().out
    for name in ("small.md", "quick/tuning.json"):
        assert (tmp_path / "cut" / name).read_text() == (finished / name).read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grid": {"fedavg": {"client_lr": [1, 2]}, "prefed": {"tau": [1.0]}}},
            "same number of points",
        ),
        ({"grid": {"fedavg": {"client_lr": [1, 1]}}}, "more than once"),
        ({"tuning": {"seeds": [1]}}, "seeds of the comparison"),
        ({"reference": "Prefed"}, 'did you mean "PreFed"'),
        ({"tuning": {"round": 1}}, "tuning.round: unknown option"),
        (
            {"grid": {"fedavg": {"client_lt": [1, 2]}}, "reference": "FedAvg"},
            "client_lt: unknown option",
        ),
        ({"grid": {"fedavgg": {"client_lr": [1, 2]}}}, 'did you mean "fedavg"'),
        ({"grid": {"fedavg": {"client_lr.start": [1]}}, "reference": "FedAvg"}, "schedule"),
    ],
)
def test_mistakes(source: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PrefedError, match=message):
        _, study = read(str(write(tmp_path, changes)))
        list(StudyRuns(study, tmp_path / "out").tuning())


def test_scores_are_checked_before_use(source: Path, tmp_path: Path) -> None:
    _, study = read(str(source))
    folder = tmp_path / "out" / "quick"
    folder.mkdir(parents=True)
    for text in ("", "[]", '{"config": {}, "scores": [1]}', '{"config": {}, "scores": {"a": "b"}}'):
        (folder / "tuning.json").write_text(text)
        with pytest.raises(PrefedError, match="remove it"):
            StudyRuns(study, tmp_path / "out")
    (folder / "tuning.json").write_text('{"config": {"rounds": 1}, "scores": {}}')
    with pytest.raises(PrefedError, match="another config"):
        StudyRuns(study, tmp_path / "out")
    with pytest.raises(PrefedError, match="no such file or study"):
        read("nothing-of-that-name")


DONE = {path.stem for path in (ROOT / "docs" / "results").glob("*.json")}
"""Their configs are made in test_results.py as well."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in DONE else []) for n in studies()]
)
def test_shipped_studies_can_be_planned(name: str, tmp_path: Path) -> None:
    """Every point and every line is a config that `load` accepts."""
    _, study = read(name)
    study_runs = StudyRuns(study, tmp_path)
    planned = list(study_runs.tuning())
    assert len({title for title, _ in planned}) == len(planned)
    middle = {n: study.points(n)[0] for n in study.grid}
    for algorithm, like, options in study.compared().values():
        study.make_config(algorithm, like, {**middle.get(like, {}), **options})
    assert set(study.curves) <= set(study.compared())


@pytest.mark.parametrize("count", [2, 3, 8, 21, 40])
def test_student_interval_is_scipys(count: int) -> None:
    values = [float(i * i % 7) for i in range(count)]
    low, high = student_interval(values)
    mean, error = sum(values) / count, scipy.stats.sem(values)
    expected = scipy.stats.t.interval(0.95, count - 1, loc=mean, scale=error)
    assert (low, high) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("freedom", "level", "table"),
    [(1, 0.95, 12.706), (2, 0.9, 2.920), (7, 0.999, 5.408), (21, 0.95, 2.080), (120, 0.95, 1.980)],
)
def test_student_is_that_of_printed_tables(freedom: int, level: float, table: float) -> None:
    assert student(freedom, level) == pytest.approx(table, abs=5.1e-4)


def test_without_scipy_a_study_says_so_before_it_runs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(PrefedError, match=r"pip install 'prefed\[stats\]'"):
        study_command(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merged_leaves_its_arguments_alone() -> None:
    table = {"client_lr": {"start": 1.0}}
    assert merged(table, {"client_lr.start": 2.0, "tau": 1}) == {
        "client_lr": {"start": 2.0},
        "tau": 1,
    }
    assert table == {"client_lr": {"start": 1.0}}


def test_a_cosine_falls_over_the_rounds_of_the_run() -> None:
    rates = ['algorithm.client_lr={schedule = "cosine", start = 1.0}', "rounds=7"]
    assert load("digits-iid", rates).algorithm.options["client_lr"]["rounds"] == 7
    begun = load("cifar10-small", ["algorithm=fedavg", "client_lr.start=0.5", "rounds=9"])
    expected = {"schedule": "cosine", "start": 0.5, "rounds": 9}
    assert begun.algorithm.options["client_lr"] == expected
    with pytest.raises(PrefedError, match="client_lr is not a table"):
        load("digits-iid", ["client_lr.start=0.5"])
    given = ['algorithm.client_lr={schedule = "cosine", start = 1.0, rounds = 3}', "rounds=7"]
    assert load("digits-iid", given).algorithm.options["client_lr"]["rounds"] == 3


def test_jumps_are_measured_around_the_trend(tmp_path: Path) -> None:
    def run(values: list[float]) -> StoredRun:
        records = [
            {"round": i, "test_accuracy": v, "train_loss": 1.0} for i, v in enumerate(values)
        ]
        return StoredRun(tmp_path, {"rounds": len(values) - 1}, records)

    straight = run([i / 40 for i in range(40)])
    assert results.jumps(straight, ACCURACY) == pytest.approx(0, abs=1e-9)
    assert straight.has_ended
    rng = np.random.default_rng(0)
    noisy = run([i / 4000 + 0.03 * float(rng.standard_normal()) for i in range(4000)])
    assert results.jumps(noisy, ACCURACY) == pytest.approx(3, rel=0.1)


def test_a_figure_shows_every_line_and_points_to_one_that_failed() -> None:
    """A weak line widens the axis; one that failed must not squeeze the others, and is an arrow."""
    means = {"a": 46.1, "b": 46.0, "c": 44.4, "weak": 40.2, "failed": 9.0}
    rows = [
        {"label": label, "measure": "test_accuracy", "mean": mean, "interval": (mean - 1, mean + 1)}
        for label, mean in means.items()
    ]
    axes = Figure().subplots()
    results._line_by_line(axes, rows, {})
    low, _ = axes.get_xlim()
    assert 30 < low < 40.2
    arrows = [line for line in axes.lines if line.get_marker() == "<"]
    assert [np.asarray(line.get_xdata()).tolist() for line in arrows] == [[low]]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("draw", [results._line_by_line, results._against_upload])
def test_the_axis_of_results_holds_every_interval_that_is_drawn(draw: Any, sign: int) -> None:
    """Wide intervals on both sides, of the best, the worst and one in the middle; one that failed
    lies inside of another's interval, and is drawn whole as well."""
    measure = "test_accuracy" if sign > 0 else "test_loss"
    means = {"a": (50.0, 9.0), "b": (49.0, 0.1), "c": (48.0, 25.0), "d": (47.0, 30.0), "e": (30, 1)}
    rows = [
        {"label": label, "measure": measure, "mean": sign * mean, "megabytes_up": 3.0,
         "interval": (sign * mean - half, sign * mean + half)}
        for label, (mean, half) in means.items()
    ]  # fmt: skip
    axes = Figure().subplots()
    draw(axes, rows, {})
    across = draw is results._line_by_line
    low, high = axes.get_xlim() if across else axes.get_ylim()
    ends = [
        float(point[0 if across else 1])
        for bars in axes.collections
        for segment in bars.get_segments()  # type: ignore[attr-defined]
        for point in segment
    ]
    assert len(ends) == 2 * len(rows)
    assert {min(ends), max(ends)} <= {sign * 17.0, sign * 77.0, sign * 73.0, sign * 23.0}
    assert low < min(ends)
    assert max(ends) < high


def test_variants_have_curves_and_edges_are_under_the_table(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs on disk: those of a study that was run, at the edge of both its grids."""
    grid = {
        "fedavg": {"client_lr": [0.1, 0.2, 0.3]},
        "prefed": {"client_lr.start": [0.01, 0.02, 0.03]},
    }
    _, plan = read(str(write(tmp_path, {"grid": grid})))
    study_runs = StudyRuns(plan, tmp_path / "out")
    for i, (title, _) in enumerate(study_runs.tuning()):
        study_runs.scores[title] = (
            i / 10 if "fedavg" in title else (0.5 if "0.02" in title else 0.1)
        )
    runs = []
    for _, planned in study_runs.comparison():
        history = [
            {"round": r, "train_loss": 1.0, "test_accuracy": 0.1 * r, "bytes_up": 4,
             "bytes_down": 4, "bytes_down_weights": 4, "seconds": 0.1}
            for r in range(1, 5)
        ]  # fmt: skip
        runs.append(StoredRun(planned.folder, planned.config.to_dict(), history, archived=True))
    study_runs.archived = {run.folder.name: run for run in runs}
    drawn: list[Figure] = []

    def seen(figure: Figure, kind: str) -> bytes:
        drawn.append(figure)
        return to_bytes(figure, kind)

    monkeypatch.setattr(results, "to_bytes", seen)
    *_, text = results.write(study_runs, "small")
    curves = [line.get_label() for line in drawn[0].axes[0].lines]
    assert curves == list(plan.compared())
    edge = "Best at the edge of the grid, so perhaps better beyond it: FedAvg (client_lr = 0.3)."
    assert text == edge
    assert edge in (tmp_path / "out" / "small.md").read_text()


def test_a_table_says_how_many_seeds_reached_the_target() -> None:
    reached = {"accuracy": 0.2, "rounds": 6.0, "bytes_up": 1e6}
    rows: list[dict[str, Any]] = [
        {"values": {0: 0.3, 1: 0.3, 2: 0.1}, "to_target": reached | {"runs": 2}},
        {"values": {0: 0.3, 1: 0.3, 2: 0.3}, "to_target": reached | {"runs": 3}},
        {"values": {0: 0.1}, "to_target": {}},
    ]
    columns = dict(_columns_in_time(rows))
    assert columns["rounds to 20%"] == ["6 (2/3)", "6", "-"]


def test_tuned_options_are_those_that_runs_have(tmp_path: Path) -> None:
    """FedNova's are FedAvg's, where a config has none of its own."""
    grid = {"fednova": {"client_lr": [0.1, 0.5]}}
    plan = tmp_path / "nova.toml"
    table = {"title": "x", "config": "digits-noniid", "seeds": 1, "grid": grid}
    plan.write_text(tomli_w.dumps(table))
    _, study = read(str(plan))
    runs = StudyRuns(study, tmp_path / "out")
    for point in study.points("fednova"):
        for seed in study.tuning.seeds:
            runs.scores[key("fednova", point, seed)] = float(point["client_lr"])
    tuned = tomllib.loads(runs._tuned_toml())["tuned"]["fednova"]
    inherited = load("digits-noniid", ["algorithm=fednova"]).algorithm.options
    assert "client_momentum" in inherited
    assert tuned == inherited | {"client_lr": 0.5}
