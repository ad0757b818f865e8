"""What an algorithm is: a value made of three choices."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, ValidationError
from torch import Tensor

from prefed.errors import PrefedError, explain
from prefed.registry import Registry
from prefed.rules import SGD, Rule
from prefed.schedule import Rate
from prefed.sharing import Policy

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm", "prefed.algorithms")


class Algorithm(BaseModel):
    """The base of all algorithms, and by itself plain local SGD with averaging.

    A subclass declares its options as fields and overrides the choices that differ. Options are
    checked when the value is made; unknown ones are refused with the nearest known name.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    client_lr: Rate
    server_lr: Rate = 1.0
    clip_norm: PositiveFloat | None = None
    """Clients scale a gradient down to this length if it is longer."""
    weight_decay: NonNegativeFloat = 0.0
    """Clients add this times the weights to the gradient, after clipping."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            lines = explain(error, type(self), prefix=f"{type(self).__name__}.")
            raise PrefedError("\n".join(lines)) from None

    def client_rule(self) -> Rule:
        return SGD()

    def server_rule(self) -> Rule:
        return SGD()

    def sharing(self) -> dict[str, Policy]:
        """The policy of each field of the client rule; a field not named here is reset."""
        return {}

    def pseudo_gradient(self, delta: Tensor, local_steps: int) -> Tensor:
        """What the server rule is fed with: minus the mean change of the clients."""
        return delta.neg_()
