"""What a run is after: which model is its best, and when it has come far enough."""

import math
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    field_serializer,
    field_validator,
    model_validator,
)

from prefed.core.errors import PrefedError, did_you_mean
from prefed.core.plain import name_of
from prefed.training.trainer import Record


class Goal:
    """A number of records that should become as high or as low as it can."""

    FORM = re.compile(r"(?:(best|highest|lowest)\b\s*)?([A-Za-z]\w*)?")
    FALLING = re.compile(r"(^|_)(loss|perplexity|error|std)(_|$)")
    """Numbers of these names should fall, all others rise, unless "lowest" or "highest" is said."""

    def __init__(self, text: str) -> None:
        found = self.FORM.fullmatch(text.strip())
        if found is None or (found[1] in ("highest", "lowest") and not found[2]):
            raise ValueError(
                'should be "best", or such as "best test_f1", "highest test_score" or '
                '"lowest test_error"'
            )
        self.direction, self.key = found[1], found[2]

    def resolve(self, where: str, known: Collection[str]) -> None:
        """Settle which key it is, of those that records will have."""
        defaults = [key for key in ("test_accuracy", "test_loss") if key in known]
        if self.key is None:
            if not defaults:
                raise PrefedError(f"{where}: there is no test set; name a key such as train_loss")
            self.key = defaults[0]
        elif self.key not in known:
            raise PrefedError(
                f"{where}: no round has a number {self.key!r}{did_you_mean(self.key, known)}"
            )

    @property
    def sign(self) -> int:
        falls = self.direction == "lowest" or (
            self.direction != "highest" and self.FALLING.search(self.key) is not None
        )
        return -1 if falls else 1

    def value(self, record: Record) -> float | None:
        """None in rounds without it."""
        found: float | None = record.get(self.key)
        return found


class Best:
    """The round with the best value so far. Of several that are equally good, the first."""

    def __init__(self, goal: Goal, min_delta: float = 0.0) -> None:
        self.goal, self.min_delta = goal, min_delta
        self.round = self.since = 0
        """Which it is, and the number of evaluations since then."""
        self.value: float | None = None

    def see(self, record: Record) -> bool:
        """Whether this round is the best so far."""
        value = self.goal.value(record)
        if value is None or not math.isfinite(value):
            self.since += value is not None
            return False
        before, sign = self.value, self.goal.sign
        if before is None or sign * (value - before) > self.min_delta:
            self.round, self.value, self.since = record["round"], value, 0
            return True
        self.since += 1
        return False


COMPARISON = re.compile(r"([^<>=]+)([<>])=([^<>=]+)")


class StopWhen(BaseModel):
    """When a run ends before its last round: by `patience`, by a `target`, or whichever comes
    first. "test_accuracy >= 0.9" stands for a metric with a target."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    metric: str | None = None
    """A key of records, such as test_accuracy; "lowest test_x" and "highest test_x" say what is
    better where the name does not. None: test_accuracy, or test_loss if there are no labels."""
    patience: PositiveInt | None = None
    """End after this many evaluations in a row without a better value."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Better means by more than this."""
    target: float | None = None
    """End when the value is this good."""
    function: Callable[[Record], bool] | None = None
    """End when it returns true for the record of a round. In Python only."""

    @model_validator(mode="before")
    @classmethod
    def _from_short(cls, given: Any) -> Any:
        if callable(given):
            return {"function": given}
        if isinstance(given, dict | StopWhen):
            return given
        if not isinstance(given, str) or (found := COMPARISON.fullmatch(given)) is None:
            raise ValueError('should be such as {"patience": 10} or "test_accuracy >= 0.9"')
        direction = "highest" if found[2] == ">" else "lowest"
        return {"metric": f"{direction} {found[1].strip()}", "target": found[3].strip()}

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str | None) -> str | None:
        Goal(metric or "best")
        return metric

    @model_validator(mode="after")
    def _check(self) -> "StopWhen":
        if self.patience is None and self.target is None and self.function is None:
            raise ValueError("needs a patience or a target")
        return self

    @field_serializer("function")
    def _name(self, function: Any) -> str | None:
        return None if function is None else name_of(function)


class Stopper:
    """Looks at each round, and says why the run should end after it."""

    def __init__(self, wanted: StopWhen, known: Collection[str]) -> None:
        self.wanted, self.best = wanted, Best(Goal(wanted.metric or "best"), wanted.min_delta)
        if wanted.patience is not None or wanted.target is not None:
            self.best.goal.resolve("stop_when.metric", known)

    def see(self, record: Record) -> str:
        wanted, best, goal = self.wanted, self.best, self.best.goal
        try:
            if wanted.function is not None and wanted.function(record):
                return f"{name_of(wanted.function)} said so"
        except KeyError as error:
            raise PrefedError(
                f"stop_when: the record of a round has no {error}, only {', '.join(record)}"
            ) from error
        except TypeError as error:
            none = [name for name, value in record.items() if value is None]
            if not none:
                raise
            raise PrefedError(
                f"stop_when: {error}; {', '.join(none)} may be None in a round, as where nothing "
                f"is evaluated"
            ) from error
        best.see(record)
        if (value := goal.value(record)) is None:
            return ""
        if wanted.target is not None and goal.sign * (value - wanted.target) >= 0:
            return f"{goal.key} is {value:.4g}, the target was {wanted.target:g}"
        if wanted.patience is not None and best.since >= wanted.patience:
            since = f"since round {best.round} ({best.value:.4g})" if best.round else "at all"
            return f"{goal.key} has not become better {since}"
        return ""
