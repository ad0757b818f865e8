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
"""

import copy
import json
from collections import Counter
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, PrivateAttr, model_validator

from prefed.algorithms import ALGORITHMS
from prefed.core.errors import PrefedError, did_you_mean
from prefed.experiments.changes import assign
from prefed.experiments.config import Config, load
from prefed.experiments.toml_files import read_plan

Point = dict[str, Any]
"""Options of an algorithm; "client_lr.start" is the key `start` of the table `client_lr`."""


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
        for name in self.grid:
            found = [json.dumps(point, sort_keys=True) for point in self.points(name)]
            if twice := [point for point, times in Counter(found).items() if times > 1]:
                raise ValueError(f"grid.{name}: has the point {twice[0]} more than once")
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


def merged(table: Point, point: Point) -> Point:
    """A copy of the table with the options of a point set."""
    result = copy.deepcopy(table)
    for path, value in point.items():
        assign(result, path.split("."), value, path)
    return result
