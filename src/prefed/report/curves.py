"""From runs to curves: for each group of seeds a mean and the range around it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from prefed.experiments.measures import LOSS
from prefed.experiments.ranking import Group
from prefed.experiments.stored_runs import StoredRun

MOST_POINTS = 400
"""A curve with more is thinned: no screen shows them, and the file stays small."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Told apart by the colour-blind (Okabe and Ito)."""

X: dict[str, tuple[str, Callable[[StoredRun], list[float]]]] = {
    "round": ("round", lambda run: [float(r["round"]) for r in run.history]),
    "megabytes": (
        "megabytes uploaded",
        lambda run: [b / 1e6 for b in accumulate(r["bytes_up"] for r in run.history)],
    ),
    "seconds": ("seconds", lambda run: list(accumulate(r["seconds"] for r in run.history))),
}


@dataclass
class Curve:
    label: str
    colour: str
    x: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass
class Chart:
    name: str
    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    percent: bool = False
    log: bool = False
    split: str = "test"
    """What its runs were evaluated on."""

    def has_data(self) -> bool:
        return any(curve.x for curve in self.curves)


def charts(groups: list[Group]) -> list[Chart]:
    """What a report shows, in order, split by split; charts without data are left out. A label has
    the same colour in all of them."""
    labels = list(dict.fromkeys(group.label for group in groups))
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    splits = dict.fromkeys(group.split for group in groups)
    return [chart for split in splits for chart in _charts(groups, split, colours)]


def _charts(groups: list[Group], split: str, colours: dict[str, str]) -> list[Chart]:
    groups = [group for group in groups if group.split == split]

    def chart(name: str, title: str, y: str, y_label: str, x: str = "round", **kind: Any) -> Chart:
        curves = [curve(group, y, x, colours[group.label]) for group in groups]
        if split != "test":
            name = f"{split}-{'train-loss' if name == 'loss' else name.removeprefix('test-')}"
        return Chart(name, title, X[x][0], y_label, curves, split=split, **kind)

    accuracy = ("test_accuracy", f"{split} accuracy")
    loss = ("test_loss", f"{split} loss")
    of = split.capitalize()
    by_loss = [
        chart("test-loss-megabytes", f"{of} loss for upload", *loss, x="megabytes", log=True),
        chart("test-loss-seconds", f"{of} loss for time", *loss, x="seconds", log=True),
    ]
    made = [
        chart("accuracy", f"{of} accuracy", *accuracy, percent=True),
        chart("loss", "Training loss", "train_loss", "training loss", log=True),
        chart("test-loss", f"{of} loss", *loss, log=True),
        chart("accuracy-megabytes", "Accuracy for upload", *accuracy, x="megabytes", percent=True),
        chart("accuracy-seconds", "Accuracy for time", *accuracy, x="seconds", percent=True),
        *(by_loss if groups[0].measure is LOSS else []),
        chart("adaptive-share", "Coordinates with √P > τ", "adaptive_share", "share", percent=True),
        chart("median-step", "Median effective step", "median_step", "lr / (√P + τ)", log=True),
    ]
    return [c for c in made if c.has_data()]


def curve(group: Group, y: str, x: str, colour: str) -> Curve:
    """Mean and range over the seeds, at the rounds that all of them have."""
    result = Curve(group.label, colour)
    runs = [run for run in group.runs if any(r.get(y) is not None for r in run.history)]
    if not runs:
        return result
    rounds = min(len(run.history) for run in runs)
    positions = np.array([X[x][1](run)[:rounds] for run in runs]).mean(axis=0)
    values = np.array(
        [
            [np.nan if (v := r.get(y)) is None else float(v) for r in run.history[:rounds]]
            for run in runs
        ]
    )
    known = np.flatnonzero(~np.isnan(values).any(axis=0))
    if len(known) > MOST_POINTS:
        known = known[np.unique(np.linspace(0, len(known) - 1, MOST_POINTS).astype(int))]
    for name, column in (
        ("x", positions), ("mean", values.mean(axis=0)),
        ("low", values.min(axis=0)), ("high", values.max(axis=0)),
    ):  # fmt: skip
        setattr(result, name, [float(f"{v:.6g}") for v in column[known]])
    return result
