"""When devices can be asked: windows that come back each day."""

from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from prefed.core.draws import Floats, Numbers
from prefed.training.distributions import Distribution, Rate, Span, amounts

HOUR = 3600.0
NEAR = 1e-9
"""A share of a day: rounding must neither make a device late for its own window, nor find it in
one that has closed."""


class Windows(BaseModel):
    """Hours of each day in which a device is idle, charging and on a free network, say."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    start: Span
    """Hours from the beginning of a day to that of the window: a number, or a distribution of one
    among clients. The run begins with a day."""
    hours: Rate
    """How long it is open."""
    day: Annotated[float, Field(gt=0, le=1e9)] = 24.0
    """Hours after which it comes back."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("start", "hours"):
            given = getattr(self, name)
            if isinstance(given, Distribution) and given.per == "job":
                raise ValueError(
                    f'{name}.per: a client has the same window each day; take "client"'
                )
        return self

    def _position(self, seed: int, now: float, clients: Numbers) -> tuple[Floats, Floats]:
        """Hours since the newest window of each client opened, and how long it is open."""
        start = amounts(self.start, seed, "device window", 0, clients)
        hours = amounts(self.hours, seed, "device window hours", 0, clients)
        since = np.mod(now / HOUR - start, self.day)
        since[since > self.day * (1 - NEAR)] = 0.0
        return since, hours

    def until_on(self, seed: int, now: float, clients: Numbers) -> Floats:
        """Seconds until each client can be asked; 0 if it can be now."""
        since, hours = self._position(seed, now, clients)
        is_open = since < hours - NEAR * self.day
        return np.where(is_open, 0.0, (self.day - since) * HOUR)

    def until_off(self, seed: int, now: float, clients: Numbers) -> Floats:
        """Seconds until each client's window closes; 0 if it is closed."""
        since, hours = self._position(seed, now, clients)
        left = np.maximum(hours - since, 0.0) * HOUR
        return np.where(hours >= self.day, np.inf, left)
