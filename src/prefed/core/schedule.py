"""Step sizes that change with the round.

A schedule is a function of the round (counted from 0), and a value that can stand in a config:
`client_lr = {schedule = "step", start = 0.05, decay = 0.1, every = 20}`.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
)


class _Schedule(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Step(_Schedule):
    schedule: Literal["step"] = "step"
    start: PositiveFloat
    decay: PositiveFloat = 0.1
    every: PositiveInt

    def __call__(self, round: int) -> float:
        return self.start * self.decay ** (round // self.every)


class Cosine(_Schedule):
    schedule: Literal["cosine"] = "cosine"
    start: PositiveFloat
    rounds: PositiveInt
    end: NonNegativeFloat = 0.0

    def __call__(self, round: int) -> float:
        done = min(round / self.rounds, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


class Warmup(_Schedule):
    schedule: Literal["warmup"] = "warmup"
    rounds: PositiveInt
    then: "Rate"

    def __call__(self, round: int) -> float:
        if round >= self.rounds:
            return at(self.then, round - self.rounds)
        return at(self.then, 0) * (round + 1) / (self.rounds + 1)


Schedule = Annotated[Step | Cosine | Warmup, Field(discriminator="schedule")]


def _kind(value: Any) -> str:
    return "a schedule" if isinstance(value, dict | _Schedule) else "a number"


Rate = Annotated[
    Annotated[PositiveFloat, Tag("a number")] | Annotated[Schedule, Tag("a schedule")],
    Discriminator(_kind),
]
"""A positive number or a schedule."""

Warmup.model_rebuild()


def at(rate: float | Step | Cosine | Warmup, round: int) -> float:
    """The rate in a round, whether it is a number or a schedule."""
    try:
        return float(rate(round)) if callable(rate) else float(rate)
    except OverflowError:
        return math.inf


def step(start: float, *, decay: float = 0.1, every: int) -> Step:
    """start * decay^(round // every)."""
    return Step(start=start, decay=decay, every=every)


def cosine(start: float, *, rounds: int, end: float = 0.0) -> Cosine:
    """Half a cosine from `start` to `end` over `rounds`, then `end`."""
    return Cosine(start=start, rounds=rounds, end=end)


def warmup(then: float | Step | Cosine | Warmup, *, rounds: int) -> Warmup:
    """A straight line up to the first value of `then` over `rounds`, then `then` from its start."""
    return Warmup(rounds=rounds, then=then)
