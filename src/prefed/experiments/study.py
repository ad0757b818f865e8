"""Studies: every algorithm tuned with the same budget, then all compared with paired seeds.

A study is a TOML file. The name of a study that comes with prefed is enough.

title = "CIFAR-10, Dirichlet 0.1"
config = "cifar10-noniid"               # a preset or a config file
seeds = 3                               # of the comparison: 0, 1, 2
reference = "PreFed"                    # differences are taken against it
[tuning]
seeds = [1000]                          # not those of the comparison
rounds = 20                             # of a tuning run; as in the config if not given
[grid.fedavg]                           # the same number of points for every algorithm
client_lr = [0.03, 0.1, 0.3]
[grid.prefed]
"client_lr.start" = [0.001, 0.003, 0.01]  # an option of the schedule in the config
[variants."PreFed, m reset"]            # also compared, with the options tuned for `like`
like = "prefed"
momentum = "reset"

All files are under one directory, and studies of the same config share runs:

CONFIG/tuning.json                      every score on the validation split
CONFIG/tuned.toml                       the best points, in the format of a preset
CONFIG/runs.jsonl.xz                    configs and records of the comparison (stored_runs.py)
CONFIG/LABEL-seedN/                     a run of the comparison until all have ended
STUDY.json, STUDY.md, STUDY.png         the results: numbers, table and figure
"""

import copy
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, PrivateAttr, model_validator

from prefed.algorithms import ALGORITHMS
from prefed.core.deprecated import with_new_names
from prefed.core.errors import PrefedError, RunFailed, did_you_mean
from prefed.core.safe_files import lock, read_whole, write_whole
from prefed.experiments.changes import assign
from prefed.experiments.config import Config, load
from prefed.experiments.jobs import Job, Many, run_jobs
from prefed.experiments.measures import ACCURACY, LAST, first_scored, measure, merit
from prefed.experiments.plans import OnEvent, Planned, run_all
from prefed.experiments.same_config import differing
from prefed.experiments.stored_runs import StoredRun, load_archive, write_archive
from prefed.experiments.sweep import on_edge
from prefed.experiments.toml_files import read as read_config
from prefed.experiments.toml_files import read_plan
from prefed.experiments.trackers import Tracking

Point = dict[str, Any]
"""Options of an algorithm; "client_lr.start" is the key `start` of the table `client_lr`."""
Scores = dict[str, float | None]
"""On the validation split, by `key`; None for a run that diverged."""
Runs = dict[str, dict[int, StoredRun]]
"""Runs of the comparison that have ended, by label and seed."""


class Tuning(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seeds: list[int] = [1000]
    """Of the tuning runs; not those of the comparison."""
    rounds: PositiveInt | None = None
    """Of a tuning run; the `rounds` of the config if None."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The share of the training samples that points are scored on."""


class Variant(BaseModel):
    """A line of the table besides the tuned algorithms. Other keys are options of the algorithm."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    like: str
    """The algorithm whose tuned options are used."""
    name: str | None = None
    """The algorithm to run; `like` if None."""


class Study(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    title: str
    """Of the table and the figure."""
    config: str
    """A preset or a config file."""
    set: list[str] = []
    """Changes to the config, in the syntax of `prefed run --set`. With an engine named here or in
    the config, results are bitwise equal on machines of the same kind; not with "auto"."""
    seeds: PositiveInt = 3
    """Of the comparison: 0, 1, ..."""
    reference: str | None = None
    """The label that differences are taken against."""
    curves: list[str] = []
    """The labels to draw round by round; all tuned algorithms if empty."""
    ends: Literal["lines", "upload"] = "lines"
    """What the final results are drawn against: one line per label, or megabytes uploaded."""
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    """A test accuracy: the table says what it takes to get there in rounds, bytes and, with
    devices, virtual time."""
    tuning: Tuning = Tuning()
    """How points are scored."""
    grid: dict[str, dict[str, list[Any]]] = {}
    """The options to try for each algorithm."""
    algorithms: list[str] = []
    """Algorithms that are compared with the options that the config has tuned for them."""
    variants: dict[str, Variant] = {}
    """More lines of the table, by label."""
    _known: dict[tuple[str, ...], Point] = PrivateAttr(default_factory=dict)
    """Configs by what was changed in them: many points have one in common."""

    @model_validator(mode="after")
    def _is_fair(self) -> "Study":
        sizes = {name: len(self.points(name)) for name in self.grid}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"grid: every algorithm needs the same number of points, not {sizes}")
        if shared := {*self.tuning.seeds} & {*range(self.seeds)}:
            raise ValueError(f"tuning.seeds: {shared} are seeds of the comparison")
        if self.reference is not None and self.reference not in self.compared():
            near = did_you_mean(self.reference, self.compared())
            raise ValueError(f"reference: no such line{near}")
        return self

    def points(self, algorithm: str) -> list[Point]:
        grid = self.grid[algorithm]
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]

    def compared(self) -> dict[str, tuple[str, str, Point]]:
        """By label: the algorithm, the algorithm whose tuned options it uses, its own options."""
        lines: dict[str, tuple[str, str, Point]] = {}
        for name in (*self.grid, *self.algorithms):
            lines[ALGORITHMS.get(name).__name__] = (name, name, {})
        for label, variant in self.variants.items():
            own = dict(variant.model_extra or {})
            lines[label] = (variant.name or variant.like, variant.like, own)
        return lines

    def make_config(self, algorithm: str, like: str, options: Point, *changes: str) -> Config:
        """A config with the options tuned for `like`, overridden by `options`."""
        given = (f"algorithm={like}", "device=cpu", "workers=1", *self.set, *changes)
        if given not in self._known:
            self._known[given] = load(self.config, given).to_dict()
        whole = copy.deepcopy(self._known[given])
        whole["algorithm"] = merged(whole["algorithm"], {**options, "name": algorithm})
        return load(whole)


def read(source: str) -> tuple[str, Study]:
    """The name of a study, and its content."""
    return read_plan(Study, "studies", source)


def check(source: str) -> int:
    """How many runs a study has, or a PrefedError with all that is wrong with their configs."""
    name, study = read(source)
    errors: dict[str, None] = {}
    lines = study.compared().values()
    options = [(name, name, point) for name in study.grid for point in study.points(name)]
    for algorithm, like, point in [*options, *lines]:
        try:
            study.make_config(algorithm, like, point)
        except PrefedError as error:
            told = str(error).splitlines()
            errors |= dict.fromkeys(f"{name}: {line} (in {algorithm})" for line in told)
    if errors:
        raise PrefedError("\n".join(errors))
    return len(options) * len(study.tuning.seeds) + len(lines) * study.seeds


class StudyRuns:
    """The runs of a study in a directory: tuning and comparison."""

    def __init__(self, study: Study, out: Path, tracking: Tracking | None = None) -> None:
        self.study, self.tracking = study, tracking
        self.out = out
        self.folder = out / Path(study.config).stem
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scores = self._read_scores()
        self.archived = load_archive(self.folder)
        self._tuning: list[tuple[str, Planned]] | None = None

    # ------------------------------------------------------------------------------- tuning

    def tuning(self) -> list[tuple[str, Planned]]:
        """Every tuning run with its key."""
        if self._tuning is None:
            self._tuning = [*self._plan_tuning()]
        return self._tuning

    def _plan_tuning(self) -> Iterator[tuple[str, Planned]]:
        study = self.study
        changes = [f"data.validation={study.tuning.validation}"]
        if study.tuning.rounds:
            changes.append(f"rounds={study.tuning.rounds}")
        for seed, name in product(study.tuning.seeds, study.grid):
            for point in study.points(name):
                config = study.make_config(name, name, point, f"seed={seed}", *changes)
                title = key(name, point, seed)
                yield title, Planned(f"tuning {title}", config, self.folder)

    def tune(self, workers: Many, on_event: OnEvent) -> None:
        """Run the points that have no score yet. Each score is written as soon as it is known."""
        waiting = []
        for title, planned in self.tuning():
            if title in self.scores:
                on_event(planned, {"end": "known"})
            else:
                waiting.append((title, planned))
        histories: dict[int, list[dict[str, Any]]] = {}
        tracked = self.tracking is not None and bool(self.tracking.names)
        firsts = [1 if tracked else first_scored(planned.config) for _, planned in waiting]
        jobs = [
            Job(planned.config.to_dict(), None, self.tracking, slug(planned.title), first)
            for (_, planned), first in zip(waiting, firsts, strict=True)
        ]
        for number, event in run_jobs(jobs, workers) if jobs else ():
            title, planned = waiting[number]
            if "record" in event:
                histories.setdefault(number, []).append(event["record"])
                on_event(planned, event)
                continue
            if "failed" in event:
                raise RunFailed(f"{planned.title}: {event['failed']}")
            run = StoredRun(self.folder, planned.config.to_dict(), histories.pop(number, []))
            by = measure([run])
            share = LAST if firsts[number] == 1 else 1.0  # it has no evaluation before
            final = by.final(run, share) if "done" in event else None
            self.scores[title] = None if final is None else by.sign * final
            text = json.dumps({"config": self._base(), "scores": self.scores}, indent=0)
            write_whole(self.folder / "tuning.json", text + "\n")
            on_event(planned, {"end": "scored" if "done" in event else "diverged"})
        if self.study.grid:
            write_whole(self.folder / "tuned.toml", self._tuned_toml())

    def best(self) -> dict[str, Point]:
        """The point with the best mean score over seeds, for each algorithm with all its scores.
        Points that diverged come last; of equal points the first is taken."""
        found = {}
        for name in self.study.grid:
            points = self.study.points(name)
            merits = [m for point in points if (m := self._merit(name, point)) is not None]
            if len(merits) == len(points) and max(merits)[1] > -math.inf:
                found[name] = points[merits.index(max(merits))]
        return found

    def on_edge(self, name: str, point: Point) -> list[str]:
        return on_edge(self.study.grid[name], point)

    def _merit(self, name: str, point: Point) -> tuple[bool, float] | None:
        keys = [key(name, point, seed) for seed in self.study.tuning.seeds]
        if any(k not in self.scores for k in keys):
            return None
        return merit([self.scores[k] for k in keys], ACCURACY)  # scores: more is better

    def _tuned_toml(self) -> str:
        lines = []
        known = read_config(self.study.config).get("tuned", {})
        for name, point in self.best().items():
            lines.append(f"[tuned.{name}]\n")
            for option, value in merged(known.get(name, {}), point).items():
                lines.append(f"{option} = {_toml(value)}\n")
            if edges := ", ".join(self.on_edge(name, point)):
                lines.append(f"# at the edge of the grid: {edges}\n")
        return "".join(lines)

    def _base(self) -> dict[str, Any]:
        """The part of the config that is the same for all scores."""
        name = next(iter(self.study.grid))
        whole = self.study.make_config(name, name, {}).to_dict()
        tuning = self.study.tuning
        return {
            **{k: v for k, v in whole.items() if k not in ("algorithm", "seed")},
            "rounds": tuning.rounds or whole["rounds"],
            "validation": tuning.validation,
        }

    def _read_scores(self) -> Scores:
        path = self.folder / "tuning.json"
        if not path.exists() or not self.study.grid:
            return {}
        try:
            known = json.loads(read_whole(path))
            config = with_new_names(known["config"], Config.RENAMED, warn=False)
            scores = dict(known["scores"])
            right = all(v is None or isinstance(v, int | float) for v in scores.values())
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            right, config, scores = False, None, {}
        if not right:
            raise PrefedError(f"{path}: does not hold the scores of a study; remove it")
        if differences := differing(config, self._base(), ended=True):
            raise PrefedError(
                f"{path}: holds scores of another config; choose another --out\n"
                + "\n".join(differences)
            )
        return scores

    # --------------------------------------------------------------------------- comparison

    def comparison(self) -> Iterator[tuple[str, Planned]]:
        """Every run of the comparison whose options are known, with its label, seed by seed."""
        best = self.best()
        for seed in range(self.study.seeds):
            for label, (name, like, options) in self.study.compared().items():
                if like in self.study.grid and like not in best:
                    continue
                chosen = {**best.get(like, {}), **options}
                config = self.study.make_config(name, like, chosen, f"seed={seed}")
                folder = self.folder / f"{slug(label)}-seed{seed}"
                yield label, Planned(f"{label} seed {seed}", config, folder)

    def compare(self, workers: Many, on_event: OnEvent) -> None:
        """Run what is not there yet, then archive all."""
        waiting = []
        for _, planned in self.comparison():
            if self._ended(planned) is not None:
                on_event(planned, {"end": "known"})
            else:
                waiting.append(planned)
        run_all(waiting, workers, on_event, self.tracking)
        self._archive()

    def _ended(self, planned: Planned) -> StoredRun | None:
        stored = planned.stored(self.archived.get(planned.folder.name))
        return stored if stored is not None and stored.has_ended else None

    def _archive(self) -> None:
        self.archived = archive(self.folder, [planned for _, planned in self.comparison()])

    def rounds(self) -> list[int]:
        """The rounds of each run of tuning and comparison together."""
        lines = len(self.study.compared()) * self.study.seeds
        whole = load(self.study.config, self.study.set).rounds
        return [plan.config.rounds for _, plan in self.tuning()] + [whole] * lines

    def runs(self) -> Runs:
        found: Runs = {}
        for label, planned in self.comparison():
            if (run := self._ended(planned)) is not None:
                found.setdefault(label, {})[run.seed] = run
        return found


def archive(folder: Path, planned: Sequence[Planned]) -> dict[str, StoredRun]:
    """Move runs that have ended from their directories into the archive of `folder`; the runs that
    are in it."""
    with lock(folder):  # another study of the same config may add runs to the same file
        known, ended = load_archive(folder), []
        for plan in planned:
            stored = plan.stored() if plan.folder.name not in known else None
            if stored is not None and stored.has_ended:
                ended.append(stored)
        if ended:
            write_archive(folder, [*known.values(), *ended])
            known = load_archive(folder)  # it can be read: nothing is lost below
    for plan in planned:
        if plan.folder.name in known and plan.folder.exists():
            with lock(plan.folder):
                shutil.rmtree(plan.folder)
    return known


def key(name: str, point: Point, seed: int) -> str:
    """The key of a tuning run in tuning.json."""
    options = (f"{k}={_plain(v)}" for k, v in sorted(point.items()))
    return " ".join([name, *options, f"seed={seed}"])


def merged(table: Point, point: Point) -> Point:
    """A copy of the table with the options of a point set."""
    result = copy.deepcopy(table)
    for path, value in point.items():
        assign(result, path.split("."), value, path)
    return result


def _toml(value: Any) -> str:
    """TOML on one line, as in presets."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return tomli_w.dumps({"x": value}).partition(" = ")[2].strip()


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def slug(label: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in label)
