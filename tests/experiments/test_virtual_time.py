"""Virtual time in tables and reports: beside rounds, bytes and real time."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import prefed
from prefed.cli.tables import points
from prefed.experiments.measures import describe, duration
from prefed.experiments.ranking import group, headings
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.study import Study
from prefed.experiments.sweep import Scored
from prefed.report.curves import charts
from prefed.report.study_results import summarise, table
from tests.helpers.commands import prefed_here


def stored(name: str, seed: int, ends: list[float] | None, accuracies: list[float]) -> StoredRun:
    """A run of as many rounds as accuracies, which end at these virtual seconds."""
    history: list[dict[str, Any]] = []
    for i, accuracy in enumerate(accuracies):
        record = {"round": i + 1, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": accuracy}
        record |= {"bytes_up": 10**6, "bytes_down": 10**6, "seconds": 0.1}
        record["bytes_down_weights"] = 10**6
        if ends is not None:
            record |= {"seconds_virtual": ends[i], "device_seconds": 8.0}
            record["wasted_device_seconds"] = 2.0
        history.append(record)
    config = {"algorithm": {"name": name}, "seed": seed, "rounds": len(history)}
    return StoredRun(Path("none"), config, history, archived=True)


TIMED = [
    stored("fast", 0, [10.0, 20.0, 30.0], [0.5, 0.9, 0.95]),
    stored("fast", 1, [30.0, 60.0, 90.0], [0.5, 0.6, 0.95]),
    stored("slow", 0, [4000.0, 8000.0, 9000.0], [0.5, 0.6, 0.7]),
]


def cells(runs: list[StoredRun], place: int = 0) -> dict[str, str]:
    groups = group(runs)
    return dict(zip(headings(groups[0], 0.9), groups[place].cells(0.9), strict=True))


def test_a_ranking_has_the_time_to_the_target() -> None:
    best, other = cells(TIMED), cells(TIMED, 1)
    assert best["virtual\nto 90%"] == duration(fmean([20.0, 90.0])) == "55 s"
    assert best["virtual\ntime"] == "60 s"
    assert best["wasted\n%"] == "25.0"
    assert other["virtual\nto 90%"] == "-"
    assert other["virtual\ntime"] == "2.5 h"


def test_without_a_clock_it_is_as_it_was() -> None:
    without = cells([stored("plain", 0, None, [0.5, 0.95])])
    assert not any("virtual" in heading or "wasted" in heading for heading in without)
    mixed = cells([*TIMED, stored("plain", 0, None, [0.5, 0.5, 0.5])], 2)
    assert mixed["virtual\nto 90%"] == mixed["virtual\ntime"] == mixed["wasted\n%"] == "-"


def test_a_report_draws_accuracy_over_virtual_time() -> None:
    plain = stored("plain", 0, None, [0.5, 0.5, 0.5])
    chart = next(c for c in charts(group([*TIMED, plain])) if c.name == "accuracy-virtual")
    lines = {curve.label: curve for curve in chart.curves}
    assert chart.x_label == "virtual seconds"
    assert lines["fast"].x == [20.0, 40.0, 60.0]
    assert lines["fast"].mean == pytest.approx([0.5, 0.75, 0.95])
    assert lines["plain"].x == []
    assert "accuracy-virtual" not in {c.name for c in charts(group([plain]))}


def test_a_study_and_a_sweep() -> None:
    runs = {"Fast": {0: TIMED[0], 1: TIMED[1]}, "Slow": {0: TIMED[2]}}
    rows = summarise(runs, None, 0.9)
    assert rows[0]["to_target"]["seconds_virtual"] == 55.0
    assert rows[0]["to_target"]["rounds"] == 2.5
    head, lines = table(rows, None)
    shown = [dict(zip(head, line, strict=True)) for line in lines]
    assert [s["virtual time to 90%"] for s in shown] == ["55 s", "-"]
    assert [s["MB up to 90%"] for s in shown] == ["2.5", "-"]
    assert [s["virtual time"] for s in shown] == ["60 s", "2.5 h"]
    assert "to_target" not in summarise(runs, None)[0]
    assert Study(title="t", config="digits-iid", target=0.9).target == 0.9
    view = points([Scored({"client_lr": "1"}, TIMED[:2]), Scored({"client_lr": "2"}, TIMED[2:])])
    columns = {str(c.header): list(c.cells) for c in view.columns}
    assert columns["virtual time"] == ["60 s", "2.5 h"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (90, "90 s"), (150, "2.5 min"), (9000, "2.5 h"), (216000, "2.5 d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    record = {**TIMED[0].history[0], "seconds_virtual": seconds}
    assert describe(record).endswith(f"  virtual {text}")


@pytest.mark.process
def test_compare(tmp_path: Path) -> None:
    words = ["compare", "digits-noniid", "--algorithms", "fedavg,prefed", "--seeds", "1"]
    words += ["--set", "rounds=2", "--set", "local_steps=1", "--set", "devices=phone"]
    done = prefed_here(*words, "--target", "0.1", "--workers", "1", "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "virtual" in done.stdout
    page = (tmp_path / "c" / "report.html").read_text()
    assert "accuracy-virtual" in page
    for run in prefed.load_runs(tmp_path / "c"):
        assert run.config["devices"] == {"classes": {"phone": {"share": 1.0}}}
        assert run.timed
