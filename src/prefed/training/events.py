"""The events of an asynchronous run, in virtual time: numbers alone, nothing of the model.

Clients in flight lie in one heap, by the time at which their updates arrive. The server takes
updates in until its buffer is full; then it steps, which makes a new version of the model. What
happens at one moment happens in this order: updates arrive, and the server steps if its buffer is
full; then clients are invited to the free places. So with devices that are all alike, and as many
places as the buffer has, a version is a round of synchronous training.

A client is invited if it is neither in flight nor in the buffer: it never has
two updates under way.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prefed.core import draws


class Job(NamedTuple):
    """One client, from the invitation to its answer. They are sorted by their arrival."""

    time: float
    """At which the update arrives, in virtual seconds."""
    number: int
    """Of all jobs of the run, in the order of the invitations."""
    client: int
    version: int
    """That it began with."""
    is_lost: bool = False
    """The client never answers; its place is free at that time."""


@dataclass(frozen=True)
class Population:
    """Who can be invited, and how many at a time."""

    seed: int
    clients: int
    buffer: int
    """Updates in a step of the server."""
    concurrency: int
    """Clients in flight at a time."""
    seconds: Callable[[int, list[int]], Sequence[float]]
    """How long each of some clients takes that begin with a version."""
    dropout: float = 0.0
    """The chance that a client never answers."""


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
        found, who = Filled(), self.who
        names = _invitations(who, version)
        busy = {job.client for job in self.in_flight}
        while len(found.buffer) < who.buffer:
            if not self.in_flight or self.in_flight[0].time > self.now:
                found.invited += self._invite(version, names, busy)
            if not self.in_flight:
                break  # all clients are in the buffer
            job = heapq.heappop(self.in_flight)
            self.now = job.time
            if job.is_lost:
                found.lost.append(job)
                busy.remove(job.client)
            else:
                found.buffer.append(job)
        return found

    def _invite(self, version: int, names: Iterator[int], busy: set[int]) -> int:
        """Fill the free places; how many were filled."""
        who = self.who
        free = min(who.concurrency - len(self.in_flight), who.clients - len(busy))
        invited: list[int] = []
        while len(invited) < free:
            client = next(names, None)
            if client is None:
                client = _anyone(who, version, self.jobs + len(invited), busy)
            if client not in busy:
                invited.append(client)
                busy.add(client)
        if not invited:
            return 0
        invited.sort()
        for client, seconds in zip(invited, who.seconds(version, invited), strict=True):
            lost = not draws.answering(who.seed, self.jobs, [client], who.dropout)
            job = Job(self.now + float(seconds), self.jobs, client, version, lost)
            heapq.heappush(self.in_flight, job)
            self.jobs += 1
        return len(invited)

    def state(self) -> dict[str, Tensor]:
        """As a checkpoint holds it."""
        jobs = sorted(self.in_flight)
        times = [self.now, *(job.time for job in jobs)]
        numbers = [[self.jobs, 0, 0, 0], *([*map(int, job[1:])] for job in jobs)]
        return {"times": torch.tensor(times, dtype=torch.float64), "jobs": torch.tensor(numbers)}

    def load_state(self, times: Tensor, jobs: Tensor) -> None:
        """Raises ValueError if it cannot be that of such a run."""
        if times.dtype != torch.float64 or jobs.dtype != torch.int64 or jobs.dim() != 2:
            raise ValueError("its events are not numbers as they should be")
        (self.now, *arrivals), (first, *rows) = times.tolist(), jobs.tolist()
        found = [
            Job(time, number, client, version, bool(lost))
            for time, (number, client, version, lost) in zip(arrivals, rows, strict=True)
        ]
        clients = {job.client for job in found if 0 <= job.client < self.who.clients}
        sound = all(job.time >= self.now and 0 <= job.number < first[0] for job in found)
        if not sound or not len(clients) == len(found) <= self.who.concurrency:
            raise ValueError("its events are not of such a run")
        self.jobs, self.in_flight = first[0], found  # sorted: a heap


@dataclass
class Filled:
    """What happened until the buffer was full."""

    buffer: list[Job] = field(default_factory=list)
    """The updates in it, as they arrived."""
    lost: list[Job] = field(default_factory=list)
    """Clients that never answered."""
    invited: int = 0
    """How many clients began."""


def _invitations(who: Population, version: int) -> Iterator[int]:
    """Those that are asked first: the cohort of that round, were the run synchronous, in an order
    that is drawn as well. It is drawn when the first is asked for."""
    cohort = draws.cohort(who.seed, version, who.clients, who.concurrency)
    order = draws.generator(who.seed, "invitations", version).permutation(len(cohort))
    yield from (cohort[place] for place in order)


def _anyone(who: Population, version: int, job: int, busy: set[int]) -> int:
    """Any client that is not busy, by a draw of this job alone. There is one."""
    generator = draws.generator(who.seed, "invited", version, job)
    if 2 * len(busy) > who.clients:
        free = sorted({*range(who.clients)} - busy)
        return free[int(generator.integers(len(free)))]
    while True:
        client = int(generator.integers(who.clients))
        if client not in busy:
            return client
