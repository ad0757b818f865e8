"""The runs of a study: each point of its grids scored, then all algorithms compared.

All files are under one directory, and studies of the same config share runs:

CONFIG/tuning.json                      every score on the validation split
CONFIG/tuned.toml                       the best points, in the format of a preset
CONFIG/runs.jsonl.xz                    configs and records of the comparison (stored_runs.py)
CONFIG/LABEL-seedN/                     a run of the comparison until all have ended
STUDY.json, STUDY.md, STUDY.png         the results: numbers, table and figure
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from prefed.core.deprecated import with_new_names
from prefed.core.errors import PrefedError, RunFailed, did_you_mean
from prefed.core.safe_files import lock, read_whole, write_whole
from prefed.experiments.config import Config, load, tuned_for
from prefed.experiments.jobs import Job, Many, run_jobs
from prefed.experiments.measures import ACCURACY, LAST, first_scored, measure, merit
from prefed.experiments.plans import OnEvent, Planned, run_all
from prefed.experiments.same_config import differing
from prefed.experiments.stored_runs import StoredRun, load_archive, write_archive
from prefed.experiments.study import Point, Study, merged
from prefed.experiments.sweep import on_edge
from prefed.experiments.toml_files import read as read_config
from prefed.experiments.trackers import Tracking

Scores = dict[str, float | None]
"""On the validation split, by `key`; None for a run that diverged."""
Runs = dict[str, dict[int, StoredRun]]
"""Runs of the comparison that have ended, by label and seed."""


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

    def forget(self, names: Sequence[str]) -> None:
        """Remove the scores and runs of these algorithms, and of lines that use their tuned
        options: what is run next is run anew."""
        lines = self.study.compared()
        known = {word for name, like, _ in lines.values() for word in (name, like)}
        for name in names:
            if name not in known:
                raise PrefedError(f"--again: the study has no {name}{did_you_mean(name, known)}")
        gone = {slug(label) for label, used in lines.items() if {*names} & {*used[:2]}}
        with lock(self.folder):
            kept = load_archive(self.folder)
            left = [r for n, r in kept.items() if n.rpartition("-seed")[0] not in gone]
            if len(left) < len(kept):
                write_archive(self.folder, left)
            for folder in self.folder.iterdir():
                if folder.is_dir() and folder.name.rpartition("-seed")[0] in gone:
                    with lock(folder):
                        shutil.rmtree(folder)
            self.archived = load_archive(self.folder)
            self.scores = {k: v for k, v in self.scores.items() if k.split()[0] not in names}
            self._write_scores()

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
            self._write_scores()
            on_event(planned, {"end": "scored" if "done" in event else "diverged"})
        if self.study.grid:
            write_whole(self.folder / "tuned.toml", self._tuned_toml())

    def _write_scores(self) -> None:
        if self.study.grid:
            text = json.dumps({"config": self._base(), "scores": self.scores}, indent=0)
            write_whole(self.folder / "tuning.json", text + "\n")

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
            for option, value in merged(tuned_for(known, name), point).items():
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


def _toml(value: Any) -> str:
    """TOML on one line, as in presets."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return tomli_w.dumps({"x": value}).partition(" = ")[2].strip()


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def slug(label: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in label)
