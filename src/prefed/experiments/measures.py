"""What runs are ranked by: test accuracy where there are labels, test loss elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefed.experiments.stored_runs import StoredRun


@dataclass(frozen=True)
class Measure:
    key: str
    """Of a record."""
    name: str
    heading: str
    sign: int
    """1 if more is better, else -1."""
    scale: float = 1.0
    unit: str = ""
    format: str = ".4g"

    def of(self, run: StoredRun) -> list[float]:
        """Its values in the rounds that were evaluated."""
        return [value for record in run.history if (value := record.get(self.key)) is not None]

    def best(self, values: Sequence[float]) -> float:
        return max(values, key=lambda value: self.sign * value)

    def text(self, value: float) -> str:
        """Without its unit, which a heading has."""
        return f"{self.scale * value:{self.format}}"


ACCURACY = Measure("test_accuracy", "accuracy", "accuracy %", 1, 100.0, " %", ".1f")
LOSS = Measure("test_loss", "loss", "test loss", -1)


def measures(runs: Sequence[StoredRun]) -> list[Measure]:
    """Those that some of the runs are judged by: a run by its accuracy if it has one."""
    own = [next((m for m in (ACCURACY, LOSS) if m.of(run)), None) for run in runs]
    return [m for m in (ACCURACY, LOSS) if m in own] or [ACCURACY]


def measure(runs: Sequence[StoredRun]) -> Measure:
    """The one that all of them are ranked by: runs without an accuracy come after those with one,
    as losses of different kinds say nothing about each other."""
    return measures(runs)[0]


def describe(record: dict[str, Any]) -> str:
    """Loss, accuracy and metrics of a round, in words; without labels, the loss on the test set."""
    loss, accuracy, test = (record[k] for k in ("train_loss", "test_accuracy", "test_loss"))
    if record.get("skipped"):
        text = "too few answers"
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
    return text
