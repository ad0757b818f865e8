"""Devices that clients train on, in virtual time: how fast each computes, sends and receives.

    devices = prefed.Devices(steps_per_second=100.0, up=1e6, down=4e6, latency=0.05)

A client takes latency + bytes down / down + steps / steps_per_second + latency + bytes up / up.
Nothing is stored of a device: its amounts are keyed draws, made again when they are needed.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from prefed.core import draws
from prefed.core.draws import Floats, Numbers
from prefed.core.errors import PrefedError, did_you_mean, explain
from prefed.training.availability import Windows
from prefed.training.device_classes import CLASSES, SPEEDS, Device, DeviceClass
from prefed.training.distributions import Distribution, amounts, uniforms
from prefed.training.traces import AMOUNTS, Trace, read_trace

TRAINING = 3
"""Training on a sample takes as many times the operations of a forward pass."""


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

    def of(self, places: ArrayLike) -> "Rates":
        """Those of some of the clients."""
        return Rates(*(getattr(self, field.name)[places] for field in fields(self)))

    def computing(self, steps: ArrayLike, samples: ArrayLike, operations: float) -> Floats:
        """Seconds for so many steps, with so many samples in all."""
        samples = np.asarray(samples, dtype=np.float64)
        every = self.sample + operations * self.operation
        return np.asarray(steps, dtype=np.float64) * self.step + samples * every


class Devices(Device):
    """Gives each client a device, and a run a virtual clock. Bytes and seconds; each amount is a
    number, a distribution, or differs by class."""

    classes: dict[str, DeviceClass] = Field(default_factory=dict)
    """Kinds of devices with their shares: {"phone": 0.7, "laptop": 0.2, "edge": 0.1} are built in;
    [devices.classes.NAME] is a table of your own."""
    trace: str | None = None
    """The path of a CSV or Parquet file with what each client, or class, did: when it was on, and
    how fast it was. See docs/devices.md."""
    trace_repeats: PositiveFloat | None = None
    """Seconds after which the trace begins again; None: its last rows hold for good."""
    windows: Windows | None = None
    """The hours of a day in which a client can be asked: {start = 22, hours = 8}. Cohorts are drawn
    among those that can. None: always."""
    vanish: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The probability that a client is lost in the middle of its work."""
    over_selection: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Ask this many times clients_per_round, and take the first clients_per_round answers."""
    deadline: PositiveFloat | None = None
    """Virtual seconds after which a round takes no more answers."""
    partial_work: bool = False
    """A client that would miss the deadline makes as many local steps as it has time for, and sends
    what it has; it must be one at least."""

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
        if self.partial_work and self.deadline is None:
            raise ValueError("partial_work: is for clients that would miss a deadline; set one")
        if self.trace_repeats is not None and self.trace is None:
            raise ValueError("trace_repeats: there is no trace")
        if not self.classes and not self.given() and self.trace is None:
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

    @cached_property
    def _said(self) -> dict[str, list[Any]]:
        """What each class says of an amount; once, if all say the same."""
        said = {name: [its.get(name) for its in self._kinds] for name in AMOUNTS}
        alike = {name for name, all_say in said.items() if all(v == all_say[0] for v in all_say)}
        return {name: all_say[:1] if name in alike else all_say for name, all_say in said.items()}

    def _amounts(self, name: str, seed: int, job: int, clients: Numbers, kinds: Numbers) -> Floats:
        """Of all clients; 0 where nothing is said."""
        said = self._said[name]
        if len(said) == 1:
            return amounts(said[0] or 0.0, seed, f"device {name}", job, clients)
        if not any(isinstance(value, Distribution) for value in said):
            return np.array([value or 0.0 for value in said])[kinds]
        found, drawn = np.zeros(len(clients)), dict[str, Floats]()
        for number, value in enumerate(said):
            of_it = kinds == number
            if isinstance(value, Distribution):
                if value.per not in drawn:
                    about = seed, f"device {name}", job, clients
                    drawn[value.per] = uniforms(value.per, *about)
                found[of_it] = value.amounts(drawn[value.per][of_it])
            else:
                found[of_it] = value or 0.0
        return found

    @cached_property
    def recorded(self) -> Trace | None:
        """The trace, from its file."""
        if self.trace is None:
            return None
        found = read_trace(self.trace, [*self.classes], self.trace_repeats)
        if self.windows is not None and not found.on.all():
            raise PrefedError(f"{self.trace}: says when devices are on, and so does windows")
        return found

    def check(self) -> None:
        """Read the files that it names, which a value alone does not need."""
        _ = self.recorded

    def _in_trace(self, seed: int, trace: Trace, clients: Numbers) -> tuple[Numbers, Numbers]:
        """The places of those clients that the trace has rows for, and their devices in it."""
        if not trace.by_class:
            return np.arange(len(clients)), clients % len(trace.devices)
        places = {name: number for number, name in enumerate(trace.devices)}
        of_class = np.array([places.get(name, -1) for name in self.classes])
        devices = of_class[self.kinds(seed, clients)]
        there = np.flatnonzero(devices >= 0)
        return there, devices[there]

    def until_on(self, seed: int, now: float, clients: ArrayLike) -> Floats:
        """Seconds until each client can be asked: 0 if it can be now, without end if it never
        can."""
        clients = np.asarray(clients, dtype=np.int64)
        if self.windows is not None:
            return self.windows.until_on(seed, now, clients)
        found = np.zeros(len(clients))
        if (trace := self.recorded) is not None:
            there, devices = self._in_trace(seed, trace, clients)
            found[there] = trace.until(True, devices, now)
        return found

    def lost(
        self, seed: int, job: int, clients: ArrayLike, seconds: Floats, now: float = 0.0
    ) -> Floats:
        """When each client is lost that works for so many seconds from now on: it vanishes, or is
        not on any more. Without end if it is not."""
        clients = np.asarray(clients, dtype=np.int64)
        found = np.full(len(clients), np.inf)
        if self.vanish:
            u = draws.uniforms(seed, "device vanishes", clients, job) / self.vanish
            found = np.where(u < 1, u * seconds, found)
        off = found
        if self.windows is not None:
            off = self.windows.until_off(seed, now, clients)
        elif (trace := self.recorded) is not None:
            there, devices = self._in_trace(seed, trace, clients)
            off = np.full(len(clients), np.inf)
            off[there] = trace.until(False, devices, now)
        return np.where(off < seconds, np.minimum(off, found), found)

    @property
    def always_on(self) -> bool:
        return self.windows is None and (self.recorded is None or bool(self.recorded.on.all()))

    @cached_property
    def are_constant(self) -> bool:
        """A client's device can do the same in every job."""
        said = [value for all_say in self._said.values() for value in all_say]
        return self.trace is None and not any(getattr(v, "per", None) == "job" for v in said)

    @property
    def by_samples(self) -> bool:
        """Whether some device's time depends on the number of samples."""
        kinds: list[dict[str, Any]] = [*self._kinds, self.recorded.amounts if self.recorded else {}]
        return any(name in its for its in kinds for name in SPEEDS[1:])

    def rates(self, seed: int, job: int, clients: ArrayLike, now: float = 0.0) -> Rates:
        """What the devices of these clients can do in a job that begins now. In a synchronous run
        a job is a round."""
        clients = np.asarray(clients, dtype=np.int64)
        kinds = self.kinds(seed, clients)
        found = {name: self._amounts(name, seed, job, clients, kinds) for name in AMOUNTS}
        if (trace := self.recorded) is not None:
            there, devices = self._in_trace(seed, trace, clients)
            rows, _ = trace.rows(devices, now)
            values = {name: column[rows] for name, column in trace.amounts.items()}
            for name, value in values.items():
                known = ~np.isnan(value)
                for other in SPEEDS if name in SPEEDS else ():
                    found[other][there[known]] = 0.0
                found[name][there[known]] = value[known]
        for name in ("steps_per_second", "operations_per_second", "up", "down"):
            amount = found[name]  # becomes the seconds of one
            np.divide(1.0, amount, out=amount, where=amount > 0)
        return Rates(
            step=found["steps_per_second"],
            sample=found["seconds_per_sample"],
            operation=TRAINING * found["operations_per_second"],
            up=found["up"],
            down=found["down"],
            latency=found["latency"],
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
        now: float = 0.0,
    ) -> Floats:
        """How long each client takes, from the server's message to its answer.

        job         the number of the job (in a synchronous run the round), for amounts `per` job
        steps       local steps of each client, or of all
        samples     in all these steps together, for seconds_per_sample and operations_per_second
        operations  of a forward pass of one sample, for operations_per_second
        now         when the job begins, for a trace
        """
        its = self.rates(seed, job, clients, now)
        there = its.latency + np.multiply(bytes_down, its.down)
        back = its.latency + np.multiply(bytes_up, its.up)
        return there + its.computing(steps, samples, operations) + back
