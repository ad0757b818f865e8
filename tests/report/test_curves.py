"""What the charts of a page hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefed.experiments.ranking import group
from prefed.experiments.record_lines import NotARecord, check_record
from prefed.experiments.stored_runs import StoredRun
from prefed.report.curves import BINS, COLOURS, Chart, charts, participation
from prefed.report.figures import draw_chart


def run(history: list[dict[str, Any]], seed: int = 0, rounds: int | None = None) -> StoredRun:
    records = [
        {"round": i, "train_loss": 1.0, "bytes_up": 4, "bytes_down": 4, "seconds": 0.1, **more}
        for i, more in enumerate(history, 1)
    ]
    config = {"algorithm": {"name": "fedavg"}, "rounds": rounds or len(records), "seed": seed}
    return StoredRun(Path("x"), config, records, archived=True)


def made(*runs: StoredRun) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(group(runs))}


def test_participation_counts_who_took_part() -> None:
    rounds: list[dict[str, Any]] = [
        {"cohort": [0, 1, 2]},
        {"cohort": [0, 1, 3], "dropped": [1]},
        {"cohort": [0, 2, 3], "left_out": [3]},
        {"cohort": [4, 5, 6], "skipped": True},
    ]
    assert sorted(participation(run(rounds))) == [1, 1, 2, 3]  # 1 and 3, then 2, then 0
    chart = made(run(rounds), run([{"cohort": [0, 1]}] * 4, seed=1))["participation"]
    (curve,) = chart.curves
    assert curve.x == [1, 2, 3, 4]
    assert curve.mean == [1, 0.5, 0.5, 1]  # means over the two seeds
    assert chart.steps
    assert draw_chart(chart).axes[0].lines[0].get_drawstyle() == "steps-mid"


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.95), (0.7, 0.73), (0.901, 0.904), (0.5, 0.5)])
def test_labels_of_a_figure_are_the_numbers_at_their_ticks(low: float, high: float) -> None:
    accuracies = [low, (low + high) / 2, high]
    axes = draw_chart(made(run([{"test_accuracy": a} for a in accuracies]))["accuracy"]).axes[0]
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    for label in axes.get_yticklabels():
        assert abs(float(label.get_text().rstrip("%")) - 100 * label.get_position()[1]) < 1e-9
    rounds = [label.get_text() for label in axes.get_xticklabels()]
    assert {"1", "2", "3"} <= {*rounds}
    assert all(text.isdigit() for text in rounds)


def test_one_round_is_marked_as_one() -> None:
    axes = draw_chart(made(run([{"test_accuracy": 0.5}]))["accuracy"]).axes[0]
    low, high = axes.get_xlim()
    assert [x for x in axes.get_xticks() if low <= x <= high] == [1]


@pytest.mark.parametrize("highest", [3, 57, 400])
def test_a_histogram_holds_every_client(highest: int) -> None:
    counts = np.random.default_rng(0).integers(0, highest + 1, 200)
    rounds = [{"cohort": [c for c in range(200) if counts[c] > r]} for r in range(highest)]
    (curve,) = made(run(rounds))["participation"].curves
    assert sum(curve.mean) == np.count_nonzero(counts)
    assert len(curve.x) <= BINS


def test_evaluations_per_client_are_drawn() -> None:
    of = {"client_accuracy_mean": 0.8, "client_accuracy_worst_tenth": 0.3}
    last = [0.0, 0.25, 0.5, 1.0, 1.0, None]
    drawn = made(run([{}, of, of | {"client_accuracies": last}]))
    assert drawn["client-accuracy"].curves[0].mean == [0.8, 0.8]
    assert drawn["client-accuracy"].curves[0].x == [2, 3]
    assert drawn["client-accuracy-worst"].curves[0].mean == [0.3, 0.3]
    (curve,) = drawn["client-accuracies"].curves
    assert (curve.mean[0], curve.mean[-1], sum(curve.mean)) == (1, 2, 5)
    assert {drawn[name].kind for name in ("client-accuracy", "client-accuracies")} == {"Clients"}
    assert "client-loss" not in drawn


def test_seeds_that_have_ended_share_rounds_and_seeds_under_way_do_not() -> None:
    long = [{"test_accuracy": 0.5}] * 4
    (curve,) = made(run(long), run(long[:2], seed=1, rounds=4))["accuracy"].curves
    assert (curve.x, curve.seeds[1]) == ([1, 2, 3, 4], [0.5, 0.5, None, None])
    diverged = run([*long[:1], {"diverged": "the weights are not finite"}], seed=1, rounds=4)
    (curve,) = made(run(long), diverged)["accuracy"].curves
    assert curve.x == [1]


def test_a_label_keeps_its_colour_whoever_leads() -> None:
    def pair(a: float, b: float) -> dict[str, tuple[str, int]]:
        runs = [run([{"test_accuracy": a}]), run([{"test_accuracy": b}])]
        runs[1].config["algorithm"] = {"name": "prefed"}
        return {c.label: (c.colour, c.dash) for c in made(*runs)["accuracy"].curves}

    wanted = {"fedavg": (COLOURS[0], 0), "prefed": (COLOURS[1], 0)}
    assert pair(0.1, 0.2) == pair(0.2, 0.1) == wanted


@pytest.mark.parametrize(
    "wrong", [{"cohort": 3}, {"client_accuracies": ["a"]}, {"drift": "x"}, {"client_lr": [1]}]
)
def test_records_with_other_things_in_their_place_are_refused(wrong: dict[str, Any]) -> None:
    (record,) = run([{"cohort": [1], "drift": None, "client_lr": 0.1}]).history
    assert check_record(record) == record
    with pytest.raises(NotARecord):
        check_record(record | wrong)


def test_clients_that_never_took_part_are_counted() -> None:
    config = {"rounds": 2, "data": {"split": {"name": "iid", "clients": 5}}}
    run = StoredRun(Path("x"), config, [{"cohort": [0, 3]}, {"cohort": [3]}], archived=True)
    assert sorted(participation(run)) == [0, 0, 0, 1, 2]
