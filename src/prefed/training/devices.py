"""Devices that clients train on, in virtual time: how fast each computes, sends and receives.

    devices = prefed.Devices(steps_per_second=100.0, up=1e6, down=4e6, latency=0.05)

A client takes latency + bytes down / down + steps / steps_per_second + latency + bytes up / up.
Nothing is stored of a device: its amounts are keyed draws, made again when they are needed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from prefed.core import draws
from prefed.core.draws import Floats, Numbers
from prefed.core.errors import PrefedError, did_you_mean, explain
from prefed.training.distributions import Distribution, Lognormal, Rate, Span, amounts

SPEEDS = ("steps_per_second", "seconds_per_sample", "operations_per_second")
"""The ways to say how fast a device computes."""
AMOUNTS = (*SPEEDS, "up", "down", "latency")
TRAINING = 3
"""Training on a sample takes as many times the operations of a forward pass."""


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
        return {n: v for n, v in table.items() if getattr(self, n) != fields[n].get_default()}

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


@dataclass(frozen=True)
class Rates:
    """What the devices of some clients can do in a job, a number for each client."""

    step: Floats
    """Seconds of a local step."""
    sample: Floats
    """Seconds of a sample."""
    operation: Floats
    """Seconds of an operation of a forward pass."""
    up: Floats
    """Seconds of a byte to the server."""
    down: Floats
    """Seconds of a byte from the server."""
    latency: Floats

    def computing(self, steps: ArrayLike, samples: ArrayLike, operations: float) -> Floats:
        """Seconds for so many steps, with so many samples in all."""
        samples = np.asarray(samples, dtype=np.float64)
        every = self.sample + operations * self.operation
        return np.asarray(steps, dtype=np.float64) * self.step + samples * every


class Devices(Device):
    """Gives each client a device, and a run a virtual clock. Bytes and seconds; each amount is a
    number, a distribution, or differs by class."""

    classes: dict[str, DeviceClass] = {}
    """Kinds of devices with their shares: {"phone": 0.7, "laptop": 0.2, "edge": 0.1} are built in;
    [devices.classes.NAME] is a table of your own."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            lines = explain(error, type(self), prefix="Devices.")
            raise PrefedError("\n".join(lines)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    # Inside of Settings, what is wrong is told together with all else.

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        """A name, as "phone", stands for devices of that class alone."""
        given = {"name": given} if isinstance(given, str) else given
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            rest = {key: value for key, value in given.items() if key != "name"}
            return {"classes": {given["name"]: 1.0}} | rest
        return given

    @field_validator("classes", mode="before")
    @classmethod
    def _from_shares(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        bare = {n: v for n, v in given.items() if isinstance(v, int | float)}
        return given | {name: {"share": share} for name, share in bare.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, its in self.classes.items():
            if not its.given() and not self.given() and name not in CLASSES:
                known = did_you_mean(name, CLASSES)
                raise ValueError(f"classes.{name}: says nothing of its devices{known}")
        total = sum(its.share for its in self.classes.values())
        if self.classes and abs(total - 1) > 1e-6:
            raise ValueError(f"classes: the shares add up to {total:g}; they should add up to 1")
        if not self.classes and not self.given():
            raise ValueError('needs a speed or a rate, such as up = 1e6, or classes = {"phone": 1}')
        return self

    @cached_property
    def _kinds(self) -> list[dict[str, Any]]:
        """The amounts of each class; without classes, of the only one."""
        mine, classes = self.given(), self.classes.items()
        found = [its.over(self.over(CLASSES.get(n, Device()).given())) for n, its in classes]
        return found or [mine]

    def kinds(self, seed: int, clients: Numbers) -> Numbers:
        """Which of the classes each client is of, by their order."""
        shares = [its.share for its in self.classes.values()]
        if len(shares) < 2:
            return np.zeros(len(clients), dtype=np.int64)
        u = draws.uniforms(seed, "device class", clients)
        return np.searchsorted(np.cumsum(shares[:-1]), u, side="right")

    def _amounts(self, name: str, seed: int, job: int, clients: Numbers, kinds: Numbers) -> Floats:
        """Of all clients; 0 where nothing is said."""
        said = [its.get(name) for its in self._kinds]
        if len(said) == 1 or all(value == said[0] for value in said):
            return amounts(said[0] or 0.0, seed, f"device {name}", job, clients)
        if not any(isinstance(value, Distribution) for value in said):
            return np.array([value or 0.0 for value in said])[kinds]
        found = np.zeros(len(clients))
        for number, value in enumerate(said):
            of_it = kinds == number
            found[of_it] = amounts(value or 0.0, seed, f"device {name}", job, clients[of_it])
        return found

    def rates(self, seed: int, job: int, clients: ArrayLike) -> Rates:
        """What the devices of these clients can do in that job: in a synchronous run, a round."""
        clients = np.asarray(clients, dtype=np.int64)
        kinds = self.kinds(seed, clients)

        def of(name: str, inverse: bool = True) -> Floats:
            found = self._amounts(name, seed, job, clients, kinds)
            if inverse:
                np.divide(1.0, found, out=found, where=found > 0)
            return found

        return Rates(
            step=of("steps_per_second"),
            sample=of("seconds_per_sample", inverse=False),
            operation=TRAINING * of("operations_per_second"),
            up=of("up"),
            down=of("down"),
            latency=of("latency", inverse=False),
        )

    def seconds(
        self,
        seed: int,
        job: int,
        clients: ArrayLike,
        bytes_down: ArrayLike,
        steps: ArrayLike,
        bytes_up: ArrayLike,
        samples: ArrayLike = 0,
        operations: float = 0.0,
    ) -> Floats:
        """How long each client takes, from the server's message to its answer.

        job         the number of the job (in a synchronous run the round), for amounts `per` job
        steps       local steps of each client, or of all
        samples     in all these steps together, for seconds_per_sample and operations_per_second
        operations  of a forward pass of one sample, for operations_per_second
        """
        its = self.rates(seed, job, clients)
        there = its.latency + np.multiply(bytes_down, its.down)
        back = its.latency + np.multiply(bytes_up, its.up)
        return there + its.computing(steps, samples, operations) + back
