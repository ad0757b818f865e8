"""One ranking: the command line, the report and the tables name the same winner."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tomli_w

from prefed.experiments.config import load
from prefed.experiments.measures import ACCURACY, LOSS, megabytes, merit
from prefed.experiments.plans import Planned
from prefed.experiments.ranking import group
from prefed.experiments.stored_runs import load_runs
from prefed.experiments.sweep import plan_point
from prefed.report.curves import charts
from tests.helpers.commands import prefed_here

ROUNDS = 20
WORDS = ["--set", f"rounds={ROUNDS}", "--set", "algorithm=fedavg"]
CHANGES = [f"rounds={ROUNDS}", "algorithm=fedavg"]


def store(planned: Planned, accuracies: list[float], diverged: bool = False) -> None:
    """A run on disk that has ended with these accuracies: a command takes it as it is."""
    planned.folder.mkdir(parents=True)
    (planned.folder / "config.toml").write_text(tomli_w.dumps(planned.config.to_dict()))
    lines: list[dict[str, Any]] = [
        {"round": i, "train_loss": 1.0, "test_loss": 1 - a, "test_accuracy": a,
         "bytes_up": 4, "bytes_down": 4, "seconds": 0.1}
        for i, a in enumerate(accuracies, 1)
    ]  # fmt: skip
    if diverged:
        lines[-1] |= {"diverged": "the weights are not finite"}
    (planned.folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    (planned.folder / "model.safetensors").touch()


def on_the_test_set(planned: Planned) -> Planned:
    """The run that a sweep makes of its best point."""
    whole = planned.config.to_dict()
    whole["data"]["validation"] = 0.0
    folder = planned.folder.parent.parent / "best" / planned.folder.name
    return Planned(planned.title, load(whole), folder)


def rows(html: str, heading: str) -> list[str]:
    """The first cells of the table under a heading."""
    table = html.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    return re.findall(r"<tr><th>([^<]*)</th>", table.partition("<tbody>")[2])


def test_a_sweep_and_its_report_name_the_same_winner(tmp_path: Path) -> None:
    """0.01 is best in the last round, 0.03 over the last tenth, and one seed of 0.1 diverged
    while the other was best of all."""
    steady, lucky = [0.9] * ROUNDS, [0.5] * (ROUNDS - 1) + [0.95]
    for lr, curve in (("0.01", lucky), ("0.03", steady), ("0.1", [0.99] * ROUNDS)):
        plan = plan_point("digits-noniid", CHANGES, {"client_lr": lr}, 2, tmp_path / "s" / "points")
        for planned in plan:
            store(planned, curve, diverged=lr == "0.1" and planned.config.seed == 1)
            store(on_the_test_set(planned), [0.71 if lr == "0.03" else 0.6] * ROUNDS)
    words = ["--grid", "client_lr=0.01,0.03,0.1", "--seeds", "2", "--out", "s", "--workers", "1"]
    done = prefed_here("sweep", "digits-noniid", *WORDS, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "best on the validation split: --set client_lr=0.03" in done.stdout
    assert "its accuracy on the test set: 71.0 %" in done.stdout
    html = (tmp_path / "s" / "report.html").read_text()
    named = rows(html, "Ranking on the validation split")
    assert named == [f"fedavg client_lr={lr}" for lr in (0.03, 0.01, 0.1)]
    assert rows(html, "Ranking on the test set") == ["fedavg client_lr=0.03"]
    assert "71.0" in html
    assert "validation accuracy %" in html
    assert "after the last round" not in html

    # The axes say what the curves are of.
    shown = {c.name: (c.y_label, len(c.curves)) for c in charts(group(load_runs(tmp_path / "s")))}
    assert shown["validation-accuracy"] == ("validation accuracy", 3)
    assert shown["accuracy"] == ("test accuracy", 3)
    assert {"validation-loss", "validation-train-loss"} <= shown.keys()


def test_the_best_on_the_edge_is_said_on_the_command_line_and_in_the_report(tmp_path: Path) -> None:
    for lr, value in (("0.01", 0.5), ("0.03", 0.6), ("0.1", 0.7)):
        point, folder = {"client_lr": lr}, tmp_path / "s" / "points"
        for planned in plan_point("digits-noniid", CHANGES, point, 1, folder):
            store(planned, [value] * ROUNDS)
            store(on_the_test_set(planned), [value] * ROUNDS)
    words = ["--grid", "client_lr=0.01,0.03,0.1", "--out", "s", "--workers", "1"]
    done = prefed_here("sweep", "digits-noniid", *WORDS, *words, cwd=tmp_path)
    said = "client_lr=0.1 lies on the edge of the grid"
    assert said in done.stdout
    assert said in (tmp_path / "s" / "report.html").read_text()


@pytest.mark.long
def test_the_report_of_a_sweep_made_later_has_its_heat_map(tmp_path: Path) -> None:
    """Of two keys, on the axes they had, by the last tenth: to the pixel that of `prefed sweep`."""
    for i, (tau, lr) in enumerate((t, c) for t in ("0.1", "0.01") for c in ("0.01", "0.1", "1")):
        point, folder = {"server_momentum": tau, "client_lr": lr}, tmp_path / "s" / "points"
        changes = [*CHANGES[:1], "algorithm=fedavgm"]
        for planned in plan_point("digits-noniid", changes, point, 1, folder):
            store(planned, [0.1 * i] * (ROUNDS - 1) + [0.1], diverged=i == 2)
            store(on_the_test_set(planned), [0.5] * ROUNDS)
    words = ["--grid", "server_momentum=0.1,0.01", "--grid", "client_lr=0.01,0.1,1", "--out", "s"]
    words += ["--set", "rounds=20", "--set", "algorithm=fedavgm", "--workers", "1"]
    done = prefed_here("sweep", "digits-noniid", *words, "--figures", "f", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = prefed_here("report", "s", "-o", "later.html", "--figures", "g", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = ((tmp_path / folder / "heat-map.png").read_bytes() for folder in "gf")
    assert ours == theirs
    assert "<h2>Heat map</h2>" in (tmp_path / "later.html").read_text()
    prefed_here("report", "s/best", "-o", "best.html", cwd=tmp_path)
    assert "<h2>Heat map</h2>" not in (tmp_path / "best.html").read_text()


def test_groups_are_judged_by_the_last_tenth(tmp_path: Path) -> None:
    values = [i / 40 for i in range(ROUNDS)]
    for planned in plan_point("digits-noniid", CHANGES, {"client_lr": "0.1"}, 1, tmp_path):
        store(planned, values)
    (only,) = group(load_runs(tmp_path))
    assert only.mean() == pytest.approx(fmean(values[-2:]))
    assert only.split == "validation"


def test_a_setting_of_which_a_seed_diverged_comes_after_all_others() -> None:
    settings: list[list[float | None]] = [[0.9, None], [0.2, 0.4], [None, None], [0.5, 0.3]]
    best = sorted(settings, key=lambda results: merit(results, ACCURACY), reverse=True)
    assert best == [[0.5, 0.3], [0.2, 0.4], [0.9, None], [None, None]]
    assert merit([2.0, 4.0], LOSS) == (True, -3.0)


def test_few_bytes_are_not_zero_megabytes() -> None:
    sizes = (0, 324, 51_234, 949_999, 999_999, 1_000_000, 12_345_678)
    assert [*map(megabytes, sizes)] == ["0", "0.00032", "0.051", "0.95", "1.0", "1.0", "12.3"]
