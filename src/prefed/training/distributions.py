"""Amounts that differ from device to device: a number, or a distribution to draw them from.

`up = {distribution = "lognormal", median = 1e6, sigma = 1.0}` in a config. The draws are keyed, and
made for any number of clients at once: an amount is the quantile of a uniform number.
"""

from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from prefed.core import draws
from prefed.core.draws import Floats, Numbers

SMALLEST, LARGEST = 1e-9, 1e18
"""No amount that is drawn is outside: nothing takes no time, or for ever."""


class Distribution(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    per: Literal["client", "job"] = "client"
    """A client has one amount for good, or a new one for each job; a synchronous round is a job."""
    least: PositiveFloat = SMALLEST
    """Smaller amounts become this."""
    most: PositiveFloat = LARGEST
    """Larger amounts become this."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        pairs = [("least", "most"), ("low", "high")]
        for low, high in (p for p in pairs if hasattr(self, p[0])):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} should not be above {high}")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table: dict[str, Any] = write(self)
        unused = {n for n in ("per", "least", "most") if n not in self.model_fields_set}
        return {name: value for name, value in table.items() if name not in unused}

    def quantile(self, u: Floats) -> Floats:
        raise NotImplementedError

    def amounts(self, u: Floats) -> Floats:
        """The amounts of clients with these uniform numbers."""
        found = self.quantile(u)
        return np.minimum(np.maximum(found, self.least, out=found), self.most, out=found)


class Constant(Distribution):
    """The same for all."""

    distribution: Literal["constant"] = "constant"
    value: PositiveFloat
    """The amount."""

    def quantile(self, u: Floats) -> Floats:
        return np.full_like(u, self.value)


class Lognormal(Distribution):
    """Its logarithm is normal."""

    distribution: Literal["lognormal"] = "lognormal"
    median: PositiveFloat
    """Half of all are below."""
    sigma: Annotated[float, Field(ge=0, le=10)]
    """The standard deviation of the natural logarithm: with 1, a device in six is more than 2.7
    times as fast as the median, and one in six less than 1/2.7 of it."""

    def quantile(self, u: Floats) -> Floats:
        normal = torch.special.ndtri(torch.from_numpy(u)).numpy()
        found: Floats = self.median * np.exp(self.sigma * normal)
        return found


class Pareto(Distribution):
    """A long tail of large amounts: P(amount > x) = (scale / x)^shape."""

    distribution: Literal["pareto"] = "pareto"
    scale: PositiveFloat
    """The smallest."""
    shape: PositiveFloat
    """The smaller, the longer the tail; the mean is finite above 1."""

    def quantile(self, u: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return self.scale * (1 - u) ** (-1 / self.shape)


class Exponential(Distribution):
    """P(amount > x) = exp(-x / mean)."""

    distribution: Literal["exponential"] = "exponential"
    mean: PositiveFloat
    """Over all devices, or jobs."""

    def quantile(self, u: Floats) -> Floats:
        return -self.mean * np.log1p(-u)


class Uniform(Distribution):
    """Any amount between two is as likely as another."""

    distribution: Literal["uniform"] = "uniform"
    low: NonNegativeFloat
    """The smallest."""
    high: PositiveFloat
    """The largest."""

    def quantile(self, u: Floats) -> Floats:
        return self.low + (self.high - self.low) * u


class LogUniform(Distribution):
    """Any factor between two amounts is as likely as another."""

    distribution: Literal["loguniform"] = "loguniform"
    low: PositiveFloat
    """The smallest."""
    high: PositiveFloat
    """The largest."""

    def quantile(self, u: Floats) -> Floats:
        found: Floats = self.low * np.exp(np.log(self.high / self.low) * u)
        return found


AnyDistribution = Annotated[
    Constant | Lognormal | Pareto | Exponential | Uniform | LogUniform,
    Field(discriminator="distribution"),
]


def _kind(value: Any) -> str:
    return "a distribution" if isinstance(value, dict | Distribution) else "a number"


Rate = Annotated[
    Annotated[float, Field(ge=SMALLEST, le=LARGEST), Tag("a number")]
    | Annotated[AnyDistribution, Tag("a distribution")],
    Discriminator(_kind),
]
"""A positive number, or the distribution of one."""

Span = Annotated[
    Annotated[float, Field(ge=0, le=LARGEST), Tag("a number")]
    | Annotated[AnyDistribution, Tag("a distribution")],
    Discriminator(_kind),
]
"""A number that may be 0, or the distribution of one."""


def amounts(
    given: float | Distribution, seed: int, purpose: str, job: int, clients: Numbers
) -> Floats:
    """The amount of each of these clients, in that job (a number)."""
    if not isinstance(given, Distribution):
        return np.full(len(clients), given, dtype=np.float64)
    return given.amounts(uniforms(given.per, seed, purpose, job, clients))


def uniforms(per: str, seed: int, purpose: str, job: int, clients: Numbers) -> Floats:
    """What amounts are quantiles of."""
    if per == "job":
        return draws.uniforms(seed, f"{purpose} of a job", clients, job)
    return draws.uniforms(seed, purpose, clients)
