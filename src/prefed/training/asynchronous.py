"""How the server of an asynchronous run takes updates in, and what it makes of old ones.

    FedBuff    Nguyen et al. 2022: asynchronous = {buffer = 10, concurrency = 100}
    FedAsync   Xie et al. 2019:    asynchronous = {buffer = 1, concurrency = 100, mix = "models",
                                                   alpha = 0.6}

An update is of the version of the model that its client began with. What becomes of an old one is
in stale.py; the mean over the buffer and the step of the server are those of every round.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from prefed.core.errors import PrefedError, explain

ONE_PROCESS = (
    "asynchronous: is for simulations in one process, not for several ranks (torchrun) and not for "
    "Flower's nodes; leave it out, or set workers in place of ranks"
)


class Asynchronous(BaseModel):
    """The server waits for no one: it steps as soon as its buffer is full of updates, whatever
    version of the model they began with."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    buffer: PositiveInt | None = None
    """Updates that make a step of the server; not set: clients_per_round. 1 is a step for every
    update, as in FedAsync."""
    concurrency: PositiveInt | None = None
    """Clients in flight at a time; not set: as many as the buffer takes."""
    staleness: Literal["polynomial", "hinge", "constant"] = "polynomial"
    """How an update counts that began s versions ago: (1 + s)^-exponent; by the "hinge", 1 up to
    `grace` and 1 / (1 + slope * (s - grace)) after it; or "constant", as a new one."""
    exponent: NonNegativeFloat = 0.5
    """Of "polynomial"."""
    slope: PositiveFloat = 10.0
    """Of "hinge": a in FedAsync."""
    grace: NonNegativeInt = 4
    """Of "hinge": b in FedAsync."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How an update counts that is not old at all; FedAsync takes 0.6."""
    mix: Literal["changes", "models"] = "changes"
    """The server adds the clients' "changes", as FedBuff does, or moves towards their "models", as
    FedAsync does: an old model also takes back a part of what came after it."""

    state: Literal["mix", "take", "ignore"] = "mix"
    """Averaged state (P, m, v, statistics) of old updates: the server's copy moves towards it by
    the weight of the update ("mix"); or "take" it as from a new one; or "ignore" it."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            lines = explain(error, type(self), prefix="Asynchronous.")
            raise PrefedError("\n".join(lines)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    # Inside of Settings, what is wrong is told together with all else.

    def weight(self, staleness: int) -> float:
        """How an update counts that began so many versions ago."""
        late = staleness - self.grace
        factors: dict[str, float] = {
            "polynomial": (1 + staleness) ** -self.exponent,
            "hinge": 1 / (1 + self.slope * late) if late > 0 else 1.0,
            "constant": 1.0,
        }
        return self.alpha * factors[self.staleness]

    def state_weight(self, staleness: int) -> float:
        """How its averaged state counts."""
        if self.state == "mix":
            return self.weight(staleness)
        return 1.0 if self.state == "take" or staleness == 0 else 0.0
