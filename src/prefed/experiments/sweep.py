"""Sweeps: try values of config keys, choose on a validation split, test the choice once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from prefed.core.errors import PrefedError
from prefed.experiments.changes import SEEDS, refuse
from prefed.experiments.config import load
from prefed.experiments.jobs import Many
from prefed.experiments.measures import measure
from prefed.experiments.plans import OnEvent, Planned, run_all
from prefed.experiments.ranking import Group, flatten, group
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.trackers import Tracking

VALIDATION = 0.2
"""Share of the training samples that is set aside unless the config says otherwise."""

Point = dict[str, str]
"""A value, as text, for each key that is swept."""


@dataclass(frozen=True)
class Space:
    """What is tried: lists of values, and ranges (low, high) that are drawn from on a log scale."""

    lists: dict[str, list[str]]
    ranges: dict[str, tuple[float, float]]

    def grid(self) -> list[Point]:
        if self.ranges:
            raise PrefedError("--range needs --random or --optuna: a grid wants lists of values")
        return [
            dict(zip(self.lists, values, strict=True)) for values in product(*self.lists.values())
        ]

    def random(self, points: int) -> list[Point]:
        """Each once: of lists alone there are no more than their grid has."""
        generator, drawn = np.random.default_rng(0), list[Point]()
        most = points if self.ranges else min(points, len({*map(str, self.grid())}))
        while len(drawn) < most:
            point = {k: v[int(generator.integers(len(v)))] for k, v in self.lists.items()}
            for key, (low, high) in self.ranges.items():
                value = math.exp(generator.uniform(math.log(low), math.log(high)))
                point[key] = f"{value:.6g}"
            if point not in drawn:
                drawn.append(point)
        return drawn


@dataclass(frozen=True)
class Scored:
    point: Point
    runs: list[StoredRun]

    @property
    def merit(self) -> tuple[bool, float]:
        """What points are ranked by, more is better."""
        return Group("", self.runs, measure=measure(self.runs)).merit()

    @property
    def score(self) -> float:
        """Mean over seeds; minus infinity if any of them diverged."""
        none_diverged, mean = self.merit
        return mean if none_diverged else -math.inf


Suggest = Callable[[list[Scored]], list[Point]]
"""The next points to try, given all that were tried; none ends the sweep."""


def all_at_once(points: list[Point]) -> Suggest:
    return lambda tried: [] if tried else points


class Optuna:
    """Points by Optuna's TPE sampler, `batch` at a time."""

    def __init__(self, space: Space, points: int, batch: int) -> None:
        try:
            import optuna
        except ImportError:
            raise PrefedError("--optuna needs Optuna: pip install 'prefed[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=0)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.space, self.points, self.batch = space, points, batch
        self.asked: list[Any] = []

    def __call__(self, tried: list[Scored]) -> list[Point]:
        for trial, scored in zip(self.asked, tried[-len(self.asked) :], strict=False):
            self.study.tell(trial, scored.score)
        self.asked = [
            self.study.ask() for _ in range(max(0, min(self.batch, self.points - len(tried))))
        ]
        return [self._point(trial) for trial in self.asked]

    def _point(self, trial: Any) -> Point:
        point = {k: trial.suggest_categorical(k, v) for k, v in self.space.lists.items()}
        for key, (low, high) in self.space.ranges.items():
            point[key] = f"{trial.suggest_float(key, low, high, log=True):.6g}"
        return point


def sweep(
    source: str,
    changes: Sequence[str],
    suggest: Suggest,
    seeds: int,
    out: Path,
    workers: Many = None,
    on_event: OnEvent = lambda planned, event: None,
    tracking: Tracking | None = None,
) -> list[Scored]:
    """Try points on the validation split until there are no more; the best comes first."""
    tried: list[Scored] = []
    while batch := suggest(tried):
        plans = [plan_point(source, changes, point, seeds, out / "points") for point in batch]
        stored = iter(run_all([p for plan in plans for p in plan], workers, on_event, tracking))
        for point, plan in zip(batch, plans, strict=True):
            tried.append(Scored(point, [next(stored) for _ in plan]))
    return sorted(tried, key=lambda scored: scored.merit, reverse=True)


def points_of(runs: Sequence[StoredRun]) -> list[Scored]:
    """The points of a sweep as its runs tell: those of one algorithm on a validation split, by the
    keys that they differ in, in the order that the names of their directories have. The best comes
    first; none if nothing was swept."""
    groups = [g for g in group(runs) if g.split == "validation"]
    configs = [flatten(g.runs[0].config) for g in groups]
    keys = sorted({k for config in configs for k in config} - {"seed"})
    differing = [k for k in keys if len({str(config.get(k)) for config in configs}) > 1]
    if not differing or "algorithm.name" in differing:
        return []
    names = {k.removeprefix("algorithm."): k for k in differing}
    title = groups[0].runs[0].folder.name
    order = sorted(names, key=lambda name: f",{title}".find(f",{name}="))
    return [
        Scored({name: _text(config.get(names[name])) for name in order}, g.runs)
        for g, config in zip(groups, configs, strict=True)
    ]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plan_point(
    source: str, changes: Sequence[str], point: Point, seeds: int, out: Path
) -> list[Planned]:
    """The runs of one point, on the validation split."""
    base = load(source, changes)
    held_out = base.data.validation or VALIDATION
    return _plan(source, [*changes, f"data.validation={held_out}"], point, seeds, out)


def evaluate_best(
    source: str,
    changes: Sequence[str],
    best: Scored,
    seeds: int,
    out: Path,
    workers: Many = None,
    on_event: OnEvent = lambda planned, event: None,
    tracking: Tracking | None = None,
) -> list[StoredRun]:
    """The chosen point once more, on all training samples and the test set."""
    whole = [*changes, "data.validation=0"]
    planned = _plan(source, whole, best.point, seeds, out / "best")
    return run_all(planned, workers, on_event, tracking)


def _plan(
    source: str, changes: Sequence[str], point: Point, seeds: int, out: Path
) -> list[Planned]:
    refuse(changes, seed=SEEDS)
    title = " ".join(f"{key}={value}" for key, value in point.items())
    name = title.replace(" ", ",").replace("/", "_").replace(":", ".")
    assigned = [f"{key}={value}" for key, value in point.items()]
    return [
        Planned(
            f"{title} seed {seed}",
            load(source, [*changes, *assigned, f"seed={seed}"]),
            out / f"{name},seed={seed}",
        )
        for seed in range(seeds)
    ]


def on_edge(lists: Mapping[str, Sequence[Any]], best: Mapping[str, Any]) -> list[str]:
    """The keys whose best value is the smallest or largest that was tried, of at least three."""
    edges = []
    for key, tried in lists.items():
        try:
            values = sorted(float(value) for value in tried)
        except (TypeError, ValueError):
            continue
        if len(values) > 2 and float(best[key]) in (values[0], values[-1]):
            edges.append(key)
    return edges
