"""Tables that others printed, computed again: each cell is one or several runs of a preset.

A table is a TOML file. The name of one that comes with prefed is enough.

title = "MNIST, 2NN: rounds to 97 %"
source = "McMahan et al. 2017, table 1"
config = "table-mcmahan-2nn"            # a preset or a config file
target = 0.97                           # cells are rounds to it; without it, a number at the end:
measure = "test_accuracy"               # in %, or another number in the records
also = ["test_loss"]                    # shown behind it
[[cells]]
row = "C = 0.1"
column = "iid"
printed = 87
set = ["clients_per_round=10"]          # changes to the config, as in `prefed run --set`
grid = {client_lr = [0.05, 0.1, 0.2]}   # of which the best counts, where the source did so
[[notes]]
text = "why it differs"

All files are under one directory:

NAME/runs.jsonl.xz                      configs and records of runs that have ended
NAME/CELL/                              a run until it has ended
NAME.md                                 the table
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from prefed.core.errors import PrefedError
from prefed.experiments.config import load
from prefed.experiments.jobs import Many
from prefed.experiments.plans import OnEvent, Planned, run_all
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.study_runs import archive, slug
from prefed.experiments.toml_files import read_plan


class Cell(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    row: str
    """Where it stands."""
    column: str
    """Where it stands."""
    printed: float | None = None
    """What the source has there; None if it has nothing."""
    set: list[str] = []
    """Changes to the config."""
    grid: dict[str, list[Any]] = {}
    """Options of which the best point counts."""

    def points(self) -> Iterator[list[str]]:
        """The changes of each run of the cell."""
        for values in product(*self.grid.values()):
            chosen = zip(self.grid, values, strict=True)
            yield [*self.set, *(f"{key}={value}" for key, value in chosen)]


class PrintedTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    title: str
    """What is in the cells."""
    source: str
    """Who printed it, and where."""
    config: str
    """A preset or a config file."""
    target: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Cells are rounds to this test accuracy."""
    measure: str = "test_accuracy"
    """Without a target, cells are this number in the record of the last round: the test accuracy in
    %, or another of which less is better, such as "objective_gap"."""
    also: list[str] = []
    """Further numbers in the same record, shown behind it; "highest objective" is the highest such
    number in the second half of the rounds."""
    seeds: PositiveInt = 1
    """Runs of each point: 0, 1, ..."""
    notes: list[str] = []
    """What is known about differences, one paragraph each."""
    cells: list[Cell]
    """One for each number."""

    @property
    def no_number(self) -> str:
        """What a run without one is called."""
        return "diverged" if self.target is None else "not reached"


def read(source: str) -> tuple[str, PrintedTable]:
    """The name of a table, and its content."""
    return read_plan(PrintedTable, "tables", source)


def check(source: str) -> int:
    """The number of runs of a table, whose configs are all right."""
    _, table = read(source)
    points = [changes for cell in table.cells for changes in cell.points()]
    for changes in points:
        load(table.config, changes)
    return len(points) * table.seeds


def rounds_to(target: float, run: StoredRun) -> float | None:
    """As McMahan et al. count: where the best accuracy so far, a line from one evaluation to the
    next, crosses the target. None if it does not."""
    best, before = 0.0, 0
    for record in run.history:
        accuracy, round = record.get("test_accuracy"), record["round"]
        if accuracy is None:
            continue
        if accuracy >= target:
            share = (target - best) / (accuracy - best) if before else 1.0
            return float(before + share * (round - before))
        best, before = max(best, accuracy), round
    return None


@dataclass(frozen=True)
class Point:
    """One setting of a cell, and its runs."""

    cell: Cell
    changes: list[str]
    """To the config of the table."""
    planned: list[Planned]
    """A run for each seed."""


class TableRuns:
    """The runs of a table in a directory."""

    def __init__(self, name: str, table: PrintedTable, out: Path) -> None:
        self.table, self.folder = table, out / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.points = [self._point(c, changes) for c in table.cells for changes in c.points()]
        self.planned = [planned for point in self.points for planned in point.planned]

    def _point(self, cell: Cell, changes: list[str]) -> Point:
        planned = []
        for seed in range(self.table.seeds):
            config = load(self.table.config, ["device=cpu", *changes, f"seed={seed}"])
            words = [cell.row, cell.column, *changes[len(cell.set) :], f"seed={seed}"]
            planned.append(Planned(" ".join(words), config, self.folder / slug("-".join(words))))
        return Point(cell, changes, planned)

    def chosen(self, only: str | None) -> list[Planned]:
        """The runs with all of these words in their titles."""
        words = set((only or "").lower().split())
        found = [p for p in self.planned if words <= {*p.title.lower().split()}]
        if not found:
            titles = "; ".join(p.title for p in self.planned)
            raise PrefedError(f"--only {only}: no cell has these words; there are: {titles}")
        return found

    def run(self, workers: Many, on_event: OnEvent, only: str | None = None) -> None:
        """Run what is not there yet, then archive all. The same call again goes on after a stop."""
        waiting, known = [], archive(self.folder, self.planned)
        for planned in self.chosen(only):
            if planned.stored(known.get(planned.folder.name)) and planned.folder.name in known:
                on_event(planned, {"end": "known"})
            else:
                waiting.append(planned)
        try:
            run_all(waiting, workers, on_event)
        finally:
            archive(self.folder, self.planned)

    def results(self) -> Iterator[tuple[Point, float | None, list[tuple[Point, str]]]]:
        """For each cell its best point, the number there (None if no run has ended, or none has
        reached the target), and what is known of all its points."""
        known, table = archive(self.folder, self.planned), self.table
        best = max if table.target is None and table.measure == "test_accuracy" else min
        for cell in self.table.cells:
            reached, told = [], []
            points = [point for point in self.points if point.cell is cell]
            for point in points:
                names = [planned.folder.name for planned in point.planned]
                text = "not run yet"
                if all(name in known for name in names):
                    found = [known[name] for name in names]
                    number = self._number(found)
                    text = table.no_number if number is None else self._text(number, found)
                    reached += [] if number is None else [(number, point)]
                told.append((point, text))
            number, point = best(reached, key=lambda pair: pair[0], default=(None, points[0]))
            yield point, number, told

    def _number(self, runs: list[StoredRun]) -> float | None:
        """The mean over seeds; None if one has none."""
        if (target := self.table.target) is not None:
            found = [rounds_to(target, run) for run in runs]
        else:
            found = [_last(run, self.table.measure) for run in runs]
        return _mean(found)

    def _text(self, number: float, runs: list[StoredRun]) -> str:
        """A number, and what is shown behind it."""
        more = {name: _mean([_last(run, name) for run in runs]) for name in self.table.also}
        words = [f"{name} {value:.3g}" for name, value in more.items() if value is not None]
        return f"{number:.3g} ({', '.join(words)})" if words else f"{number:.3g}"


def _last(run: StoredRun, measure: str) -> float | None:
    """What the last record has; accuracy in %. None of a run that diverged."""
    value = run.final(measure)
    if measure.startswith("highest "):
        late = (record.get(measure[8:]) for record in run.history[len(run.history) // 2 :])
        value = max((number for number in late if number is not None), default=None)
    return 100 * value if value is not None and measure.endswith("accuracy") else value


def _mean(found: list[float | None]) -> float | None:
    """None if one is."""
    numbers = [number for number in found if number is not None]
    return fmean(numbers) if len(numbers) == len(found) else None


HEADINGS = ("row", "column", "printed", "ours", "of")


def rows(runs: TableRuns) -> Iterator[tuple[str, str, str, str, str, str]]:
    """For each cell: where it stands, what was printed, what was found and how, the command."""
    for point, number, points in runs.results():
        cell, texts = point.cell, {id(p): text for p, text in points}
        missing = "not run yet" if "not run yet" in texts.values() else runs.table.no_number
        own = missing if number is None else texts[id(point)]
        own_changes = len(cell.set)
        told = "; ".join(f"{' '.join(p.changes[own_changes:])}: {text}" for p, text in points)
        told = told if cell.grid else ""
        printed = "" if cell.printed is None else f"{cell.printed:g}"
        changes = shlex.join(word for change in point.changes for word in ("--set", change))
        command = f"prefed run {runs.table.config} {changes}"
        yield cell.row, cell.column, printed, own, told, command


def to_markdown(runs: TableRuns) -> str:
    table = runs.table
    lines = [f"{table.title}. {table.source}.", "",
             "| | | printed | ours | of | command |", "|---|---|---|---|---|---|"]  # fmt: skip
    for *cells, command in rows(runs):
        lines.append(f"| {' | '.join(cells)} | `{command}` |")
    return "\n".join([*lines, *(f"\n{' '.join(note.split())}" for note in table.notes), ""])
