"""Studies: every algorithm tuned with the same budget, then all compared with paired seeds.

A study is a TOML file; some come with prefed and go by their name.

title = "CIFAR-10, Dirichlet 0.1"
config = "cifar10-noniid"               # a preset or a config file
seeds = 3                               # of the comparison: 0, 1, 2
reference = "PreFed"                    # differences are taken against it
[tuning]
seeds = [1000]                          # none of the comparison's
rounds = 20                             # fewer than the config has, if it says so
[grid.fedavg]                           # the same number of points for every algorithm
client_lr = [0.03, 0.1, 0.3]
[grid.prefed]
"client_lr.start" = [0.001, 0.003, 0.01]  # of a schedule that the config has
[variants."PreFed, m reset"]            # compared as well, with step sizes tuned for another
like = "prefed"
momentum = "reset"

Everything lies under one directory, so that studies of the same config share runs:

CONFIG/tuning.json                      every score on the validation split
CONFIG/tuned.toml                       the best points, as a preset has them
CONFIG/LABEL-seedN/                     a run directory for each line of the table and each seed
STUDY.json, STUDY.md, STUDY.png         what it says
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from prefed.algorithms import ALGORITHMS
from prefed.core.deprecated import with_new_names
from prefed.core.errors import PrefedError, RunFailed, did_you_mean, explain
from prefed.core.safe_files import read_whole, write_whole
from prefed.experiments.config import Config, assign, load, read_toml
from prefed.experiments.config import read as read_config
from prefed.experiments.jobs import Job, run_jobs
from prefed.experiments.plans import OnEvent, Planned, run_all
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.sweep import final_score, on_edge

Point = dict[str, Any]
"""Options of an algorithm; a dot goes into a table, as in "client_lr.start"."""
Scores = dict[str, float | None]
"""On the validation split, by `key`; None for a run that diverged."""
Runs = dict[str, dict[int, StoredRun]]
"""Those of the comparison that have come to their end, by label and seed."""


class Tuning(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seeds: list[int] = [1000]
    rounds: PositiveInt | None = None
    """Of a tuning run; as many as the config has if not given."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1


class Variant(BaseModel):
    """A line of the table beside the tuned algorithms; all other keys are the algorithm's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    like: str
    """The algorithm whose tuned options it takes."""
    name: str | None = None
    """The algorithm, if it is not that one."""


class Study(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    config: str
    set: list[str] = []
    """Changes to the config, as `prefed run --set` takes them. An engine named here or in the
    config makes results the same to the bit on machines of one kind; "auto" does not."""
    seeds: PositiveInt = 3
    reference: str | None = None
    curves: list[str] = []
    """The labels that are drawn round by round; all that are tuned unless given."""
    ends: Literal["lines", "upload"] = "lines"
    """What the ends of runs are drawn against."""
    tuning: Tuning = Tuning()
    grid: dict[str, dict[str, list[Any]]] = {}
    """The options to try for each algorithm; without any, the tuned ones of the config are taken
    for the algorithms in `algorithms`."""
    algorithms: list[str] = []
    variants: dict[str, Variant] = {}

    @model_validator(mode="after")
    def _is_fair(self) -> Study:
        sizes = {name: len(self.points(name)) for name in self.grid}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"grid: every algorithm should have as many points, not {sizes}")
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
        """For each label: the algorithm, whose tuned options it takes, and its own options."""
        lines: dict[str, tuple[str, str, Point]] = {}
        for name in (*self.grid, *self.algorithms):
            lines[ALGORITHMS.get(name).__name__] = (name, name, {})
        for label, variant in self.variants.items():
            own = dict(variant.model_extra or {})
            lines[label] = (variant.name or variant.like, variant.like, own)
        return lines

    def make_config(self, algorithm: str, like: str, options: Point, *changes: str) -> Config:
        """Options given here come before those that the config has tuned for `like`."""
        given = [f"algorithm={like}", "device=cpu", *self.set, *changes]
        whole = load(self.config, given).to_dict()
        whole["algorithm"] = merged(whole["algorithm"], {**options, "name": algorithm})
        return load(whole)


def studies() -> list[str]:
    folder = files("prefed").joinpath("studies")
    names = (path.name for path in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find(source: str) -> Path:
    """The file of a study, given itself or by its name."""
    if source in studies():
        return Path(str(files("prefed").joinpath("studies", f"{source}.toml")))
    if not Path(source).is_file():
        raise PrefedError(f"{source}: no such file or study{did_you_mean(source, studies())}")
    return Path(source)


def read(source: str) -> tuple[str, Study]:
    """The name of a study, and what it says."""
    path = find(source)
    try:
        return path.stem, Study.model_validate(read_toml(path))
    except ValidationError as error:
        raise PrefedError("\n".join(explain(error, Study, prefix=f"{path.name}: "))) from None


class Bench:
    """A study at work in a directory."""

    def __init__(self, study: Study, out: Path) -> None:
        self.study = study
        self.out = out
        self.folder = out / Path(study.config).stem
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scores = self._read_scores()

    # ------------------------------------------------------------------------------- tuning

    def tuning(self) -> Iterator[tuple[str, Planned]]:
        """Every run of the tuning with its key."""
        study = self.study
        changes = [f"data.validation={study.tuning.validation}"]
        if study.tuning.rounds:
            changes.append(f"rounds={study.tuning.rounds}")
        for seed, name in product(study.tuning.seeds, study.grid):
            for point in study.points(name):
                config = study.make_config(name, name, point, f"seed={seed}", *changes)
                title = key(name, point, seed)
                yield title, Planned(f"tuning {title}", config, self.folder)

    def tune(self, workers: int | None, on_event: OnEvent) -> None:
        """Score what has no score yet; whatever was scored is on the disk at once."""
        waiting = []
        for title, planned in self.tuning():
            if title in self.scores:
                on_event(planned, {"end": "known"})
            else:
                waiting.append((title, planned))
        histories: dict[int, list[dict[str, Any]]] = {}
        jobs = [Job(planned.config.to_dict()) for _, planned in waiting]
        for number, event in run_jobs(jobs, workers or os.cpu_count() or 1) if jobs else ():
            title, planned = waiting[number]
            if "record" in event:
                histories.setdefault(number, []).append(event["record"])
                on_event(planned, event)
                continue
            if "failed" in event:
                raise RunFailed(f"{planned.title}: {event['failed']}")
            run = StoredRun(self.folder, planned.config.to_dict(), histories.pop(number, []))
            score = final_score(run) if "done" in event else -math.inf
            self.scores[title] = score if math.isfinite(score) else None
            text = json.dumps({"config": self._base(), "scores": self.scores}, indent=0)
            write_whole(self.folder / "tuning.json", text + "\n")
            on_event(planned, {"end": "scored" if "done" in event else "diverged"})
        if self.study.grid:
            write_whole(self.folder / "tuned.toml", self._tuned_toml())

    def best(self) -> dict[str, Point]:
        """The best point of each algorithm whose tuning is complete: by the mean over seeds, with
        any that diverged last, and the first of equals."""
        found = {}
        for name in self.study.grid:
            points = self.study.points(name)
            scores = [self._score(name, point) for point in points]
            known = [s for s in scores if s is not None]
            if len(known) == len(points) and max(known) > -math.inf:
                found[name] = points[known.index(max(known))]
        return found

    def on_edge(self, name: str, point: Point) -> list[str]:
        return on_edge(self.study.grid[name], point)

    def _score(self, name: str, point: Point) -> float | None:
        keys = [key(name, point, seed) for seed in self.study.tuning.seeds]
        if any(k not in self.scores for k in keys):
            return None
        values = [self.scores[k] for k in keys]
        return fmean(-math.inf if v is None else v for v in values)

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
        """What all scores have in common."""
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
            config, scores = known["config"], dict(known["scores"])
            right = all(v is None or isinstance(v, int | float) for v in scores.values())
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            right, config, scores = False, None, {}
        if not right:
            raise PrefedError(f"{path}: does not hold the scores of a study; remove it")
        if with_new_names(config, Config.RENAMED, warn=False) != self._base():
            raise PrefedError(f"{path}: holds scores of another config; choose another --out")
        return scores

    # --------------------------------------------------------------------------- comparison

    def comparison(self) -> Iterator[tuple[str, Planned]]:
        """Every run of the comparison that can be planned by now, seed by seed."""
        best = self.best()
        for seed in range(self.study.seeds):
            for label, (name, like, options) in self.study.compared().items():
                if like in self.study.grid and like not in best:
                    continue
                chosen = {**best.get(like, {}), **options}
                config = self.study.make_config(name, like, chosen, f"seed={seed}")
                folder = self.folder / f"{_slug(label)}-seed{seed}"
                yield label, Planned(f"{label} seed {seed}", config, folder)

    def compare(self, workers: int | None, on_event: OnEvent) -> None:
        waiting = []
        for _, planned in self.comparison():
            stored = planned.stored()
            if stored is not None and came_to_its_end(stored):
                on_event(planned, {"end": "known"})
            else:
                waiting.append(planned)
        run_all(waiting, workers, on_event)

    def total(self) -> int:
        """Runs of tuning and comparison together."""
        lines = len(self.study.compared()) * self.study.seeds
        return lines + sum(1 for _ in self.tuning())

    def runs(self) -> Runs:
        found: Runs = {}
        for label, planned in self.comparison():
            stored = planned.stored()
            if stored is not None and came_to_its_end(stored):
                found.setdefault(label, {})[stored.seed] = stored
        return found


def came_to_its_end(run: StoredRun) -> bool:
    """All its rounds are there, or it diverged. Its model need not be: results that are kept or
    passed on are configs and records."""
    return run.status == "diverged" or (
        bool(run.history) and run.history[-1]["round"] == run.config["rounds"]
    )


def key(name: str, point: Point, seed: int) -> str:
    """A tuning run, in a line."""
    options = (f"{k}={_plain(v)}" for k, v in sorted(point.items()))
    return " ".join([name, *options, f"seed={seed}"])


def merged(table: Point, point: Point) -> Point:
    """The table with the options of a point set."""
    result = copy.deepcopy(table)
    for path, value in point.items():
        assign(result, path.split("."), value, path)
    return result


def _toml(value: Any) -> str:
    """On one line, as presets have it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return tomli_w.dumps({"x": value}).partition(" = ")[2].strip()


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in label)
