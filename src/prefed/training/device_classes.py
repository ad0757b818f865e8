"""What a kind of device can do, and the kinds that are built in."""

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from prefed.training.distributions import Lognormal, Rate, Span
from prefed.training.traces import AMOUNTS

SPEEDS = AMOUNTS[:3]
"""The ways to say how fast a device computes."""


class Device(BaseModel):
    """What a device can do. What is not given takes no time."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    steps_per_second: Rate | None = None
    """Local steps a second: a number, or a table such as {distribution = "lognormal", median = 100,
    sigma = 1}."""
    seconds_per_sample: Rate | None = None
    """In place of steps_per_second: seconds for each sample of each batch."""
    operations_per_second: Rate | None = None
    """In place of steps_per_second: floating-point operations a second. The operations of a sample
    are counted from the model, and three times as many for training as for a forward pass."""
    up: Rate | None = None
    """Bytes a second to the server."""
    down: Rate | None = None
    """Bytes a second from the server."""
    latency: Span | None = None
    """Seconds before each message begins to arrive."""

    @model_validator(mode="after")
    def _one_speed(self) -> Self:
        given = [name for name in SPEEDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot stand beside {given[0]}; take one of them")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is as it is by default."""
        table: dict[str, Any] = write(self)
        fields = type(self).model_fields
        return {
            n: v
            for n, v in table.items()
            if getattr(self, n) != fields[n].get_default(call_default_factory=True)
        }

    def given(self) -> dict[str, Any]:
        """The amounts that it says."""
        return {n: v for n in AMOUNTS if (v := getattr(self, n)) is not None}

    def over(self, others: dict[str, Any]) -> dict[str, Any]:
        """Its amounts, and those of others that it does not say."""
        mine = self.given()
        if any(name in mine for name in SPEEDS):
            others = {n: v for n, v in others.items() if n not in SPEEDS}
        return others | mine


class DeviceClass(Device):
    """A kind of device, and how many there are of it. What it does not say is as outside of the
    table of classes, or else as a built-in class of its name has it."""

    share: Annotated[float, Field(gt=0)]
    """Of all clients; the shares of all classes add up to 1."""


def _spread(median: float, sigma: float, least: float, most: float) -> Lognormal:
    return Lognormal(median=median, sigma=sigma, least=least, most=most)


CLASSES = {
    "phone": Device(
        operations_per_second=_spread(5e9, 0.9, 0.7e9, 35e9),
        up=_spread(0.7e6, 0.8, 0.125e6, 2.5e6),
        down=_spread(2.5e6, 0.8, 0.5e6, 12.5e6),
        latency=_spread(0.05, 0.5, 0.02, 0.5),
    ),
    "laptop": Device(
        operations_per_second=_spread(50e9, 0.5, 10e9, 200e9),
        up=_spread(2.5e6, 0.7, 0.25e6, 12.5e6),
        down=_spread(12.5e6, 0.7, 1.25e6, 125e6),
        latency=_spread(0.02, 0.5, 0.005, 0.2),
    ),
    "edge": Device(
        operations_per_second=_spread(200e9, 0.3, 50e9, 500e9),
        up=12.5e6,
        down=12.5e6,
        latency=0.01,
    ),
    "datacentre": Device(operations_per_second=1e13, up=1.25e9, down=1.25e9, latency=0.0005),
}
"""Built-in classes. Round numbers of ours: docs/devices.md says what they go by."""
