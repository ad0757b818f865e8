"""From runs to curves: for each group of seeds a mean and the range around it."""

import math
from collections import Counter
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

BINS = 20
"""Of a histogram, at most."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Told apart by the colour-blind (Okabe and Ito)."""

X: dict[str, tuple[str, Callable[[StoredRun], list[float]]]] = {
    "round": ("round", lambda run: [float(r["round"]) for r in run.history]),
    "megabytes": (
        "megabytes uploaded",
        lambda run: [b / 1e6 for b in accumulate(r["bytes_up"] for r in run.history)],
    ),
    "virtual": ("virtual seconds", lambda run: [float(r["seconds_virtual"]) for r in run.history]),
    "seconds": ("seconds", lambda run: list(accumulate(r["seconds"] for r in run.history))),
}


@dataclass
class Curve:
    label: str
    colour: str
    dash: int = 0
    """Which kind of line, where there are more labels than colours: 0 for a plain one."""
    x: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    seeds: list[list[float | None]] = field(default_factory=list)
    """The line of each seed, if there are several."""


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
    kind: str = "Results"
    """The heading it stands under."""
    steps: bool = False
    """A histogram."""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "curves": [vars(curve) for curve in self.curves]}

    def has_data(self) -> bool:
        return any(curve.x for curve in self.curves)


def charts(groups: list[Group]) -> list[Chart]:
    """What a report shows, in order, split by split; charts without data are left out. A label has
    the same colour in all of them, whoever leads."""
    labels = sorted({group.label for group in groups})
    styles = {label: (COLOURS[i % 8], i // 8) for i, label in enumerate(labels)}
    splits = dict.fromkeys(group.split for group in groups)
    return [chart for split in splits for chart in _charts(groups, split, styles)]


def _charts(groups: list[Group], split: str, styles: dict[str, tuple[str, int]]) -> list[Chart]:
    groups = [group for group in groups if group.split == split]

    def chart(name: str, title: str, y: str, y_label: str, x: str = "round", **kind: Any) -> Chart:
        curves = [curve(group, y, x, *styles[group.label]) for group in groups]
        if split != "test":
            name = f"{split}-{'train-loss' if name == 'loss' else name.removeprefix('test-')}"
        return Chart(name, title, X[x][0], y_label, curves, split=split, **kind)

    accuracy = ("test_accuracy", f"{split} accuracy")
    loss = ("test_loss", f"{split} loss")
    of = split.capitalize()
    by_loss = [
        chart("test-loss-megabytes", f"{of} loss for upload", *loss, x="megabytes", log=True),
        chart("test-loss-virtual", f"{of} loss for virtual time", *loss, x="virtual", log=True),
        chart("test-loss-seconds", f"{of} loss for time", *loss, x="seconds", log=True),
    ]
    made = [
        chart("accuracy", f"{of} accuracy", *accuracy, percent=True),
        chart("loss", "Training loss", "train_loss", "training loss", log=True),
        chart("test-loss", f"{of} loss", *loss, log=True),
        chart("accuracy-megabytes", "Accuracy for upload", *accuracy, x="megabytes", percent=True),
        chart(
            "accuracy-virtual", "Accuracy for virtual time", *accuracy, x="virtual", percent=True
        ),
        chart("accuracy-seconds", "Accuracy for time", *accuracy, x="seconds", percent=True),
        *(by_loss if groups[0].measure is LOSS else []),
        chart("epsilon", "Privacy spent", "epsilon", "epsilon"),
        *_of_clients(groups, chart),
    ]
    optimiser = [
        chart("client-lr", "Step size of clients", "client_lr", "client_lr", log=True),
        chart("server-lr", "Step size of the server", "server_lr", "server_lr", log=True),
        chart("update-norm", "Norm of the mean change", "update_norm", "norm", log=True),
        chart("drift", "Drift between clients", "drift", "distance to the mean / its norm"),
        chart("adaptive-share", "Coordinates with √P > τ", "adaptive_share", "share", percent=True),
        chart("median-step", "Median effective step", "median_step", "lr / (√P + τ)", log=True),
    ]
    for one in optimiser:
        one.kind = "Optimiser"
    return [c for c in made + optimiser if c.has_data()]


def _of_clients(groups: list[Group], chart: Callable[..., Chart]) -> list[Chart]:
    """What clients see: evaluations on the data of each, and how often each took part."""
    percent: dict[str, Any] = {"percent": True}
    made = []
    for what, many, kind in (("accuracy", "accuracies", percent), ("loss", "losses", {})):
        mean, worst = f"client_{what}_mean", f"client_{what}_worst_tenth"
        made += [
            chart(f"client-{what}", f"Mean {what} of clients", mean, what, **kind),
            chart(f"client-{what}-worst", f"Worst tenth of clients: {what}", worst, what, **kind),
        ]
        last = chart(f"client-{many}", f"Clients by {what}, at the end", "", "clients", steps=True)
        last.x_label = f"{what} of a client"
        found = [[_last(run, f"client_{many}") for run in group.runs] for group in groups]
        fill_histogram(last, found)
        made.append(last)
    took_part = chart("participation", "Participation", "", "clients", steps=True)
    took_part.x_label = "rounds a client took part in"
    fill_histogram(took_part, [[participation(run) for run in g.runs] for g in groups], whole=True)
    for one in [*made, took_part]:
        one.kind = "Clients"
    return [*made, took_part]


def participation(run: StoredRun) -> list[float]:
    """In how many rounds each client took part, in no order."""
    counts: Counter[int] = Counter()
    for record in run.history:
        if not record.get("skipped"):
            absent = {*(record.get("dropped") or ()), *(record.get("left_out") or ())}
            counts.update(client for client in record.get("cohort") or () if client not in absent)
    return [float(counts[client]) for client in {*range(_clients(run)), *counts}]


def _clients(run: StoredRun) -> int:
    """How many there are, as far as the config says."""
    data = run.config.get("data")
    data = data if isinstance(data, dict) else {}
    split = data.get("split")
    found = data.get("clients", split.get("clients") if isinstance(split, dict) else None)
    return found if isinstance(found, int) else 0


def _last(run: StoredRun, key: str) -> list[float]:
    lists = [record[key] for record in run.history if record.get(key)]
    return [float(value) for value in lists[-1] if value is not None] if lists else []


def fill_histogram(chart: Chart, values: list[list[list[float]]], whole: bool = False) -> None:
    """A line for each curve from the values of its seeds: how many of them lie in each of at most
    BINS bins, which are as wide as a whole number if `whole`."""
    everything = [v for seeds in values for own in seeds for v in own if math.isfinite(v)]
    if not everything:
        return
    low, high = min(everything), max(everything)
    width = (high - low) / BINS or 1.0
    if whole:
        width = float(math.ceil((high - low + 1) / BINS))
        low -= 0.5
    count = min(BINS, math.floor((high - low) / width) + 1)
    edges = low + width * np.arange(count + 1)
    for curve, seeds in zip(chart.curves, values, strict=True):
        rows = [np.histogram(np.clip(own, low, edges[-1]), edges)[0] for own in seeds if own]
        if rows:
            curve.x = [float(f"{x:.6g}") for x in edges[:-1] + width / 2]
            curve.mean = [float(f"{v:.6g}") for v in np.mean(rows, axis=0)]


def curve(group: Group, y: str, x: str, colour: str, dash: int = 0) -> Curve:
    """Mean and range over the seeds, at the rounds that all of them have; while some have not
    ended, at the rounds that any of them has."""
    result = Curve(group.label, colour, dash)
    runs = [run for run in group.runs if any(r.get(y) is not None for r in run.history)]
    if x == "virtual":
        runs = [run for run in runs if run.timed]
    if not runs:
        return result
    longest = max(len(run.history) for run in runs)
    positions, values = np.full((2, len(runs), longest), np.nan)
    for row, run in enumerate(runs):
        positions[row, : len(run.history)] = X[x][1](run)
        found = [np.nan if (v := r.get(y)) is None else float(v) for r in run.history]
        values[row, : len(run.history)] = found
    there = ~np.isnan(values)
    under_way = any(not run.has_ended for run in runs)
    known = np.flatnonzero(there.any(axis=0) if under_way else there.all(axis=0))
    if len(known) > MOST_POINTS:
        known = known[np.unique(np.linspace(0, len(known) - 1, MOST_POINTS).astype(int))]
    positions, values = positions[:, known], values[:, known]
    for name, column in (
        ("x", np.nanmean(positions, axis=0)), ("mean", np.nanmean(values, axis=0)),
        ("low", np.nanmin(values, axis=0)), ("high", np.nanmax(values, axis=0)),
    ):  # fmt: skip
        setattr(result, name, [float(f"{v:.6g}") for v in column])
    if len(runs) > 1:
        result.seeds = [[None if np.isnan(v) else float(f"{v:.6g}") for v in r] for r in values]
    return result
