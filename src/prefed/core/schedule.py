"""Step sizes that change with the round.

A schedule is a function of the round (counted from 0), and a value that can stand in a config:
`client_lr = {schedule = "step", start = 0.05, decay = 0.1, every = 20}`. So can a function of one's
own by its name, `client_lr = "module:function"`; in Python any function will do.
"""

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Annotated, Any, Literal, Self, SupportsFloat

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from prefed.core.errors import PrefedError
from prefed.core.option_models import Options
from prefed.core.registry import Registry

Function = Callable[[int], float]
FUNCTIONS: Registry[Function] = Registry("schedule", "prefed.core")
"""Holds none: it finds those of the user's own, "module:function"."""


class _Schedule(Options):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Step(_Schedule):
    schedule: Literal["step"] = "step"
    start: PositiveFloat
    """In the first rounds."""
    decay: PositiveFloat = 0.1
    """The factor of each step down."""
    every: PositiveInt
    """Rounds between two steps."""

    def __call__(self, round: int) -> float:
        return self.start * self.decay ** (round // self.every)


class Cosine(_Schedule):
    schedule: Literal["cosine"] = "cosine"
    start: PositiveFloat
    """In the first round."""
    rounds: PositiveInt
    """How long it falls; in a config all rounds of the run, if not given."""
    end: NonNegativeFloat = 0.0
    """Where it ends."""

    def __call__(self, round: int) -> float:
        done = min(round / self.rounds, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


class Warmup(_Schedule):
    schedule: Literal["warmup"] = "warmup"
    rounds: PositiveInt | None = None
    """How long it rises, from round to round; or set steps."""
    steps: PositiveInt | None = None
    """How long it rises, from each local step to the next, in local steps since the first round."""
    local_steps: PositiveInt | None = None
    """Those of a round, by which steps are counted; in a config the run's, if not given."""
    then: "Rate"
    """What follows: a number or another schedule."""

    @model_validator(mode="after")
    def _rounds_or_steps(self) -> Self:
        if (self.rounds is None) == (self.steps is None):
            raise ValueError("rounds: say how long it rises, in rounds or in steps")
        if self.steps is not None and self.local_steps is None:
            raise ValueError("local_steps: is required beside steps: how many a round has")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}

    def __call__(self, round: int) -> float:
        """That of a round; where it rises within rounds, the mean over the steps of one."""
        if self.steps is not None and self.local_steps is not None:
            return fmean(self.at_step(round, k) for k in range(self.local_steps))
        rounds = self.rounds or 0
        if round >= rounds:
            return at(self.then, round - rounds)
        return at(self.then, 0) * (round + 1) / (rounds + 1)

    def at_step(self, round: int, k: int) -> float:
        """That of local step k (from 0) of a round."""
        if self.steps is None or self.local_steps is None:
            return self(round)
        rise = (round * self.local_steps + k + 1) / (self.steps + 1)
        return at(self.then, max(0, round - -(-self.steps // self.local_steps))) * min(1.0, rise)


Schedule = Annotated[Step | Cosine | Warmup, Field(discriminator="schedule")]


def _kind(value: Any) -> str:
    if isinstance(value, dict | _Schedule):
        return "a schedule"
    by_name = isinstance(value, str) and ":" in value
    return "a function" if by_name or callable(value) else "a number"


def _find(value: Any) -> Any:
    return FUNCTIONS.get(value) if isinstance(value, str) else value


Rate = Annotated[
    Annotated[PositiveFloat, Tag("a number")]
    | Annotated[Schedule, Tag("a schedule")]
    | Annotated[
        Function, BeforeValidator(_find), PlainSerializer(FUNCTIONS.name_of), Tag("a function")
    ],
    Discriminator(_kind),
]
"""A positive number, a schedule, or a function of the round, which is counted from 0."""

Warmup.model_rebuild()


def at(rate: float | Function, round: int) -> float:
    """The rate in a round, whether it is a number or a schedule."""
    try:
        value = rate(round) if callable(rate) else rate
    except OverflowError:
        return math.inf
    if not isinstance(value, float | SupportsFloat) or not float(value) >= 0:
        raise PrefedError(f"schedule: gives {value} in round {round}; it should give 0 or more")
    return float(value)


def within(rate: float | Function, round: int) -> Function | None:
    """How the rate changes within a round: a function of the local step, which gives multiples of
    the round's own; None if it stays as it is."""
    if not isinstance(rate, Warmup) or rate.steps is None or rate.local_steps is None:
        return None
    if round * rate.local_steps >= rate.steps or not (mean := at(rate, round)):
        return None
    return lambda k: rate.at_step(round, k) / mean


def written(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an algorithm as they can stand in a config: functions by their names."""
    return {key: _name(key, v) if callable(v) else v for key, v in options.items()}


def _name(key: str, function: Function) -> str:
    name = FUNCTIONS.name_of(function)
    try:
        found = FUNCTIONS.get(name)
    except PrefedError:
        found = None
    if found is not function:
        raise PrefedError(
            f"algorithm.{key}: {name} cannot stand in a config, where another process would look "
            f"for it by that name; define it with def in a module, or take a prefed.schedule"
        )
    return name


def step(start: float, *, decay: float = 0.1, every: int) -> Step:
    """start * decay^(round // every)."""
    return Step(start=start, decay=decay, every=every)


def cosine(start: float, *, rounds: int, end: float = 0.0) -> Cosine:
    """Half a cosine from `start` to `end` over `rounds`, then `end`."""
    return Cosine(start=start, rounds=rounds, end=end)


def warmup(
    then: float | Function,
    *,
    rounds: int | None = None,
    steps: int | None = None,
    local_steps: int | None = None,
) -> Warmup:
    """A straight line up to the first value of `then` over `rounds`, then `then` from its start; or
    over `steps`, counted by the `local_steps` of a round."""
    return Warmup(rounds=rounds, steps=steps, local_steps=local_steps, then=then)
