"""How a deployed run deals with nodes that are late, gone or not to be trusted."""

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prefed.core.deprecated import with_new_names
from prefed.core.errors import checked

RENAMED = {"quorum": "min-fraction"}
"""Old names in a run config."""
NONE_IS_0 = ("norm_cap", "secure_neighbours")
"""TOML has no word for none."""


class Options(BaseModel):
    """In a Flower run config the same names stand with hyphens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    join_seconds: PositiveFloat = 300.0
    """How long the run waits for its nodes before it begins with those that are there."""
    round_seconds: PositiveFloat = 600.0
    """How long it waits for the updates of a round."""
    min_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The fraction of a cohort that must send a usable update for the round to count."""
    retries: NonNegativeInt = 2
    """How often the missing clients of a round with too few updates are asked again."""
    norm_cap: PositiveFloat | None = None
    """The largest norm of a client's change of the weights that is accepted."""
    secure_aggregation: bool = False
    """The server learns the sum of the updates, and no single one (docs/secure-aggregation.md)."""
    secure_neighbours: Annotated[int, Field(ge=4)] | None = None
    """How many others each node shares its secrets with; None is everybody."""
    largest_count: PositiveInt = 1_000_000
    """The most samples of one client, for a weighted sum of samples that only nodes know of."""

    @model_validator(mode="after")
    def _only_sums(self) -> Self:
        if self.secure_neighbours is not None and not self.secure_aggregation:
            raise ValueError("secure_neighbours: is for secure_aggregation")
        if self.secure_aggregation and self.norm_cap is not None:
            raise ValueError(
                "norm_cap: with secure_aggregation the server sees no single update to measure"
            )
        return self

    @classmethod
    def from_run_config(cls, table: dict[str, Any]) -> "Options":
        table = with_new_names(table, RENAMED)
        known = {name.replace("_", "-"): name for name in cls.model_fields}
        values = {known[key]: value for key, value in table.items() if key in known}
        for name in NONE_IS_0:
            if values.get(name) == 0:
                del values[name]
        return checked(cls, values)

    def to_run_config(self) -> dict[str, Any]:
        values = self.model_dump()
        values |= {name: values[name] or 0 for name in NONE_IS_0}
        return {name.replace("_", "-"): value for name, value in values.items()}
