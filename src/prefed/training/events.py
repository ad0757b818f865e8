"""The events of an asynchronous run, in virtual time: numbers alone, nothing of the model.

Clients in flight lie in one heap, by the time at which their updates arrive. The server takes
updates in until its buffer is full; then it steps, which makes a new version of the model. What
happens at one moment happens in this order: updates arrive, and the server steps if its buffer is
full; then clients are invited to the free places. So with devices that are all alike, and as many
places as the buffer has, a version is a round of synchronous training.

A client is invited if it is neither in flight nor in the buffer: it never has two updates under
way. One that was lost is not invited again before the next version.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prefed.core import draws
from prefed.core.errors import PrefedError

TRIES = 64
"""Draws for a client that can be invited before all clients are looked at."""


class Job(NamedTuple):
    """One client, from the invitation to its answer. They are sorted by their arrival."""

    time: float
    """At which the update arrives, in virtual seconds."""
    number: int
    """Of all jobs of the run, in the order of the invitations."""
    client: int
    version: int
    """That it began with."""
    is_lost: bool
    """The client is lost: at that time its place is free, and nothing arrives."""
    wasted: int
    """The bytes that it had sent by then."""
    seconds: float
    """That its device was busy."""


Work = tuple[bool, int, float]
"""How the work of a client ends: is_lost, wasted and seconds of its job."""


@dataclass(frozen=True)
class Population:
    """Who can be invited, and how many at a time."""

    seed: int
    clients: int
    buffer: int
    """Updates in a step of the server."""
    concurrency: int
    """Clients in flight at a time."""
    work: Callable[[int, Sequence[int], float], Sequence[Work]]
    """(version, clients, time) -> what becomes of those that begin with it then."""
    until_on: Callable[[float, Sequence[int]], Sequence[float]] | None = None
    """(time, clients) -> seconds until each can be invited. None: all can be always, and their work
    does not depend on the time."""


@dataclass
class Events:
    """All there is to know between two steps of the server. Changes in place: `copy` it first, if
    the step may fail."""

    who: Population
    now: float = 0.0
    jobs: int = 0
    """That there were so far."""
    in_flight: list[Job] = field(default_factory=list)
    """A heap."""

    def copy(self) -> "Events":
        return replace(self, in_flight=[*self.in_flight])

    def fill_buffer(self, version: int) -> "Filled":
        """Go on until the buffer is full, or nobody is left to wait for."""
        found, guests = Filled(), Guests(self.who, version)
        busy = {job.client for job in self.in_flight}
        while len(found.buffer) < self.who.buffer:
            if not self.in_flight or self.in_flight[0].time > self.now:
                found.invited += self._invite(guests, busy)
            if not self.in_flight:
                if self._wait(busy):
                    continue
                break
            job = heapq.heappop(self.in_flight)
            self.now = job.time
            (found.lost if job.is_lost else found.buffer).append(job)
        if not found.buffer and not found.lost:
            raise PrefedError(
                f"devices: from {self.now:g} virtual seconds on no client can ever be asked; make "
                f"the windows longer, or let the trace repeat"
            )
        return found

    def _invite(self, guests: "Guests", busy: set[int]) -> int:
        """Fill the free places, as far as there are clients; how many were filled."""
        free = min(self.who.concurrency - len(self.in_flight), self.who.clients - len(busy))
        invited: list[int] = []
        while len(invited) < free:
            client = guests.next(self.now, self.jobs + len(invited), busy)
            if client is None:
                break
            invited.append(client)
            busy.add(client)
        invited.sort()
        for client, ends in zip(invited, guests.work(invited, self.now), strict=True):
            job = Job(self.now + ends[-1], self.jobs, client, guests.version, *ends)
            heapq.heappush(self.in_flight, job)
            self.jobs += 1
        return len(invited)

    def _wait(self, busy: set[int]) -> bool:
        """Nobody is in flight: wait until a client can be invited, if there will be one."""
        free = [client for client in range(self.who.clients) if client not in busy]
        if self.who.until_on is None or not free:
            return False
        wait = min(self.who.until_on(self.now, free))
        if not math.isfinite(wait):
            return False
        self.now = max(self.now + wait, math.nextafter(self.now, math.inf))  # however it rounds
        return True

    def state(self) -> dict[str, Tensor]:
        """As a checkpoint holds it."""
        jobs = sorted(self.in_flight)
        times = [[self.now, 0.0], *([job.time, job.seconds] for job in jobs)]
        first = [self.jobs, 0, 0, 0, 0]
        numbers = [first, *([*map(int, job[1:-1])] for job in jobs)]
        return {"times": torch.tensor(times, dtype=torch.float64), "jobs": torch.tensor(numbers)}

    def load_state(self, times: Tensor, jobs: Tensor) -> None:
        """Raises ValueError if it cannot be that of such a run."""
        shapes = (times.dtype, *times.shape[1:]), (jobs.dtype, *jobs.shape[1:])
        if shapes != ((torch.float64, 2), (torch.int64, 5)) or not len(times) == len(jobs) > 0:
            raise ValueError("its events are not numbers as they should be")
        found = [
            Job(time, number, client, version, bool(lost), wasted, seconds)
            for (time, seconds), (number, client, version, lost, wasted) in zip(
                times[1:].tolist(), jobs[1:].tolist(), strict=True
            )
        ]
        now, count = float(times[0, 0]), int(jobs[0, 0])
        clients = {job.client for job in found if 0 <= job.client < self.who.clients}
        sound = all(job.time >= now and 0 <= job.number < count for job in found)
        if not sound or not len(clients) == len(found) <= self.who.concurrency:
            raise ValueError("its events are not of such a run")
        self.now, self.jobs, self.in_flight = now, count, sorted(found)  # sorted: a heap


@dataclass
class Filled:
    """What happened until the buffer was full."""

    buffer: list[Job] = field(default_factory=list)
    """The updates in it, as they arrived."""
    lost: list[Job] = field(default_factory=list)
    """Clients that were lost."""
    invited: int = 0
    """How many clients began."""


class Guests:
    """Whom to invite to begin with a version: first the cohort of that round, were the run
    synchronous, in an order that is drawn as well; then anyone."""

    def __init__(self, who: Population, version: int) -> None:
        self.who, self.version = who, version
        cohort = draws.cohort(who.seed, version, who.clients, who.concurrency)
        order = draws.generator(who.seed, "invitations", version).permutation(len(cohort))
        self.first: list[int] = [cohort[place] for place in order.tolist()]
        self.asked = 0
        """How many of these were asked."""
        self.known: dict[int, Work] = {}

    def next(self, now: float, job: int, busy: set[int]) -> int | None:
        """A client that is not busy and can be invited; None if there is none. `job` is the number
        of the job that it is for."""
        while self.asked < len(self.first):
            client = self.first[self.asked]
            self.asked += 1
            if self._free([client], now, busy):
                return client
        count = self.who.clients
        generator = draws.generator(self.who.seed, "invited", self.version, job)
        if 2 * len(busy) <= count:
            drawn: list[int] = generator.integers(count, size=TRIES).tolist()
            if found := self._free(drawn, now, busy):
                return found[0]
        free = self._free(range(count), now, busy)
        return free[int(generator.integers(len(free)))] if free else None

    def _free(self, clients: Iterable[int], now: float, busy: set[int]) -> list[int]:
        """Those that can be invited."""
        free = [client for client in clients if client not in busy]
        if self.who.until_on is None or not free:
            return free
        waits = self.who.until_on(now, free)
        return [client for client, wait in zip(free, waits, strict=True) if wait == 0]

    def work(self, clients: Sequence[int], now: float) -> Sequence[Work]:
        """What becomes of clients that begin now. Where that does not depend on the time, it is
        worked out for those that come next as well: many at once cost little more than one."""
        if self.who.until_on is not None:
            return self.who.work(self.version, clients, now)
        if any(client not in self.known for client in clients):
            soon = self.first[self.asked : self.asked + self.who.buffer]
            more = [client for client in (*clients, *soon) if client not in self.known]
            found = self.who.work(self.version, more, now)
            self.known |= dict(zip(more, found, strict=True))
        return [self.known[client] for client in clients]
