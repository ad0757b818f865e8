"""What runs are ranked by, everywhere: accuracy where there are labels, loss elsewhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prefed.experiments.stored_runs import StoredRun
from prefed.training.settings import Settings

LAST = 0.1
"""A run is judged by its mean over this last share of its evaluations, so that the noise of one
round does not decide."""


@dataclass(frozen=True)
class Measure:
    key: str
    """Of a record."""
    name: str
    sign: int
    """1 if more is better, else -1."""
    scale: float = 1.0
    unit: str = ""
    format: str = ".4g"
    span: float = math.inf
    """Between its smallest and its largest value, if it has them: 1 for a share."""

    def of(self, run: StoredRun) -> list[float]:
        """Its values in the rounds that were evaluated."""
        return [value for record in run.history if (value := record.get(self.key)) is not None]

    def final(self, run: StoredRun, share: float = LAST) -> float | None:
        """What a run that has ended is judged by: the mean over the last tenth of its evaluations,
        or another share of them. None if the last round has none, or one that is not finite."""
        last = run.history[-1].get(self.key) if run.history else None
        if last is None or not math.isfinite(last):
            return None
        values = self.of(run)
        return fmean(values[-max(1, round(share * len(values))) :])

    def heading(self, split: str) -> str:
        """Of a column: the split that the values are of, what they are, and their unit."""
        return f"{split} {self.name}{self.unit}"

    def best(self, values: Sequence[float]) -> float:
        return max(values, key=lambda value: self.sign * value)

    def cut(self, interval: tuple[float, float], low: float) -> tuple[float, float]:
        """An interval as far as it holds what can be, in units of `scale`, where `low` is the
        least. Of few values it may reach beyond; one without end stays so: nothing is known."""
        if not (math.isfinite(self.span) and math.isfinite(interval[0])):
            return interval
        return max(interval[0], self.scale * low), min(interval[1], self.scale * self.span)

    def text(self, value: float) -> str:
        """Without its unit, which a heading has."""
        return f"{self.scale * value:{self.format}}"


ACCURACY = Measure("test_accuracy", "accuracy", 1, 100.0, " %", ".1f", span=1.0)
LOSS = Measure("test_loss", "loss", -1)


def measures(runs: Sequence[StoredRun]) -> list[Measure]:
    """Those that some of the runs are judged by: a run by its accuracy if it has one."""
    own = [next((m for m in (ACCURACY, LOSS) if m.of(run)), None) for run in runs]
    return [m for m in (ACCURACY, LOSS) if m in own] or [ACCURACY]


def measure(runs: Sequence[StoredRun]) -> Measure:
    """The one that all of them are ranked by: runs without an accuracy come after those with one,
    as losses of different kinds say nothing about each other."""
    return measures(runs)[0]


def merit(results: Sequence[float | None], by: Measure) -> tuple[bool, float]:
    """What settings are ranked by, more is better: the mean over seeds of what each was judged by.
    A setting of which a seed diverged (None) comes after all of which none did."""
    known = [by.sign * result for result in results if result is not None]
    return len(known) == len(results), fmean(known) if known else -math.inf


def first_scored(settings: Settings) -> int:
    """The first round whose evaluation `Measure.final` looks at; the first of all, if something
    else asks for evaluations."""
    if settings.stop_when or settings.keep:
        return 1
    every, last = settings.evaluate_every, settings.rounds
    evaluated: list[int] = [*range(every, last, every), last]
    return evaluated[-max(1, round(LAST * len(evaluated)))]


def megabytes(count: float) -> str:
    """Bytes as megabytes: one digit after the point, and of less than one the first two."""
    return f"{count / 1e6:{'.1f' if count >= 0.995e6 else '.2g'}}"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next(((n, u) for n, u in units if seconds >= 2 * n), (1, "s"))
    return f"{seconds / size:.3g} {unit}"


def describe(record: dict[str, Any]) -> str:
    """Loss, accuracy and metrics of a round, in words; without labels, the loss on the test set."""
    loss, accuracy, test = (record[k] for k in ("train_loss", "test_accuracy", "test_loss"))
    if record.get("skipped"):
        text = "too few answers"
    elif (epsilon := record.get("epsilon")) is not None:  # its loss is nobody's business
        text = f"epsilon {epsilon:.4g}"
    else:
        text = f"loss {loss:.4f}" if loss is not None else "loss not finite"
    if accuracy is not None:
        text += f"  accuracy {accuracy:.1%}"
    elif test is not None:
        text += f"  test loss {test:.4g}"
    for key, value in record.items():
        name = key.removeprefix("test_")
        if name != key and isinstance(value, float) and name not in ("loss", "accuracy"):
            text += f"  {name} {value:.4g}"
    if (clients := record.get("client_accuracy_mean")) is not None:
        text += f"  clients {clients:.1%}, worst tenth {record['client_accuracy_worst_tenth']:.1%}"
    if (virtual := record.get("seconds_virtual")) is not None:
        text += f"  virtual {duration(virtual)}"
    return text
