"""The virtual clock of synchronous rounds: when a round ends, who is in it, what was wasted.

A round asks a cohort, and ends when it has the answers that it waits for: with its slowest client,
with the last of the first clients_per_round answers, or at the deadline. A client that is lost is
missed at once.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.draws import Floats, Numbers
from prefed.core.errors import PrefedError
from prefed.data import FederatedData
from prefed.training.devices import Devices, Rates
from prefed.training.server_state import Server
from prefed.training.settings import Settings
from prefed.training.task import Task
from prefed.training.traffic import traffic
from prefed.training.trainer import Record

FEW = 1 << 16
"""Clients whose devices are drawn once for the whole run, if they never change; the devices of more
are drawn for each cohort anew."""

TRIES = 1000
"""How often the clock moves on to find enough clients that can be asked."""


@dataclass(frozen=True)
class Jobs:
    """What some clients are to do, and how many seconds each part of it takes them."""

    there: Floats
    """Until the server's message has arrived."""
    steps: Numbers
    """Local steps."""
    step: Floats
    """Of one local step."""
    back: Floats
    """Until the answer has arrived, from the last step on."""
    sending: Floats
    """The part of `back` in which bytes go up."""
    bytes_up: int
    """Of an answer."""
    bytes_down: int
    """Of the server's message."""

    def sent_before(self, finish: Floats, end: Floats) -> Numbers:
        """The bytes of each answer that are up at some time, if it is whole at `finish`."""
        share = (end - (finish - self.sending)) / np.where(self.sending > 0, self.sending, 1.0)
        share = np.where(self.sending > 0, np.clip(share, 0, 1), end >= finish)
        return np.floor(share * self.bytes_up).astype(np.int64)

    def seconds(self, steps: Numbers | None = None) -> Floats:
        """From the server's message to the answer."""
        return self.there + (self.steps if steps is None else steps) * self.step + self.back


@dataclass(frozen=True)
class Closed:
    """A round in virtual time."""

    answers: list[int]
    """The clients that are waited for and answer, in the order of the cohort."""
    limits: dict[int, int]
    """After how many local steps clients stop that would be late."""
    record: Record
    """For the record of the round."""


class Clock:
    def __init__(
        self, devices: Devices, algorithm: Algorithm, task: Task, data: FederatedData,
        settings: Settings,
    ) -> None:  # fmt: skip
        self.devices, self.algorithm, self.data, self.settings = devices, algorithm, data, settings
        self.lockstep = algorithm.client_rule().lockstep
        if self.lockstep and (devices.over_selection > 1 or devices.deadline is not None):
            name = "over_selection" if devices.over_selection > 1 else "deadline"
            raise PrefedError(
                f"devices.{name}: clients of {type(algorithm).__name__} meet in every step, so a "
                f"round waits for all of them"
            )
        if devices.over_selection > 1 and settings.clients_per_round is None:
            raise PrefedError("devices.over_selection: needs clients_per_round; now all are asked")
        self.always_on = devices.always_on
        self.operations = task.operations(data) if devices.by_samples else 0.0
        self._begun: tuple[int, float, float, list[int]] | None = None

    def begin(self, round: int, now: float) -> tuple[float, list[int]]:
        """When a round begins that could begin now, and its cohort: drawn among the clients that
        can be asked, as soon as there are as many as the quorum."""
        if self._begun is None or self._begun[:2] != (round, now):
            self._begun = (round, now, *self._begin(round, now))
        return self._begun[2], self._begun[3]

    def _begin(self, round: int, now: float) -> tuple[float, list[int]]:
        seed, size, count = self.settings.seed, self.settings.clients_per_round, len(self.data)
        if size is not None:
            size = math.ceil(size * self.devices.over_selection - 1e-9)
        if self.always_on:
            return now, draws.cohort(seed, round, count, None if size is None else min(size, count))
        everyone, quorum = np.arange(count), self.settings.quorum
        for _ in range(TRIES):
            wait = self.devices.until_on(seed, now, everyone)
            there = np.flatnonzero(wait == 0)
            if len(there) >= quorum:
                chosen = draws.cohort(
                    seed, round, len(there), None if size is None else min(size, len(there))
                )
                return now, there[chosen].tolist()
            more = float(np.partition(wait, quorum - 1)[quorum - 1])
            if not math.isfinite(more):
                break
            now = max(now + more, math.nextafter(now, math.inf))  # whatever rounding does
        raise PrefedError(
            f"devices: from {now:g} virtual seconds on there are never {quorum} clients that can "
            f"be asked at a time (the quorum); make the windows longer, or let the trace repeat"
        )

    def jobs(self, server: Server, job: int, clients: list[int], now: float) -> Jobs:
        """What it takes these clients to answer a message of the server's that goes out now."""
        steps, samples = self._work(clients)
        size = traffic(self.algorithm, server, 1, int(steps[0]) if self.lockstep else 0)
        rates = self._rates(job, clients, now)
        there = rates.latency + size["bytes_down"] * rates.down
        sending = size["bytes_up"] * rates.up
        step = rates.computing(steps, samples, self.operations) / steps
        if self.lockstep:  # a gradient up and the mean gradient down in each step
            step += 2 * rates.latency
        sizes = size["bytes_up"], size["bytes_down"]
        return Jobs(there, steps, step, rates.latency + sending, sending, *sizes)

    def _rates(self, job: int, clients: list[int], now: float) -> Rates:
        if self._every_rate is not None:
            return self._every_rate.of(clients)
        return self.devices.rates(self.settings.seed, job, clients, now)

    @cached_property
    def _every_rate(self) -> Rates | None:
        """Those of all clients, if they are few and never change."""
        if len(self.data) > FEW or not self.devices.are_constant:
            return None
        return self.devices.rates(self.settings.seed, 0, np.arange(len(self.data)))

    def _work(self, clients: list[int]) -> tuple[Numbers, Numbers]:
        """The local steps of each client, and the samples in all of them. Clients that are made on
        demand are not made for it, if it is the same for all."""
        settings = self.settings
        size, epochs = settings.batch_size, settings.local_epochs
        if epochs is None and (size is not None or not self.devices.by_samples):
            steps = np.full(len(clients), settings.local_steps)
            return steps, steps * (size or 0)
        own = np.array([self.data.size(client) for client in clients])
        steps = np.array([settings.steps(samples) for samples in own.tolist()])
        if epochs is None:
            return steps, steps * own
        whole = settings.drop_last and size is not None
        return steps, np.where(whole & (own >= (size or 0)), steps * (size or 0), epochs * own)

    def close(self, server: Server, now: float, cohort: list[int], answering: list[int]) -> Closed:
        """The round of a cohort that was asked now. `answering` are those of it that would answer
        if nobody were late or lost; the others are lost as soon as they have the message."""
        devices, jobs = self.devices, self.jobs(server, server.round, cohort, now)
        deadline = math.inf if devices.deadline is None else devices.deadline
        steps = jobs.steps
        if devices.partial_work:
            with np.errstate(divide="ignore", invalid="ignore"):
                room = np.floor((deadline - jobs.there - jobs.back) / jobs.step)
            late = jobs.seconds() > deadline
            enough = late & (room >= 1)
            steps = np.where(enough, np.minimum(np.nan_to_num(room), steps), steps).astype(np.int64)
        finish = jobs.seconds(steps)
        if devices.partial_work:
            finish = np.where(steps < jobs.steps, np.minimum(finish, deadline), finish)
        lost = devices.lost(self.settings.seed, server.round, cohort, finish, now)
        silent = ~np.isin(cohort, answering) if len(answering) < len(cohort) else np.False_
        lost = np.where(silent, np.minimum(lost, jobs.there), lost)

        # The first answers in time, by when they come and then by their place in the cohort.
        arrival = np.where(np.isfinite(lost) | (finish > deadline), np.inf, finish)
        wanted = self.settings.clients_per_round or len(cohort)
        first = np.argsort(arrival, kind="stable")[:wanted]
        taken = np.zeros(len(cohort), dtype=np.bool_)
        taken[first[np.isfinite(arrival[first])]] = True
        busy = np.minimum(np.minimum(finish, lost), deadline)
        lasts = float(arrival[first[-1]]) if taken.sum() == wanted else float(busy.max())

        spent = np.minimum(busy, lasts)
        sent, wasted = jobs.sent_before(finish, spent), ~taken
        record: Record = {
            "seconds_virtual": now + lasts,
            "device_seconds": float(spent.sum()),
            "wasted_device_seconds": float(spent[wasted].sum()),
            "wasted_bytes_up": int(sent[wasted].sum()),
            "wasted_bytes_down": int(wasted.sum()) * jobs.bytes_down,
        }
        partial = taken & (steps < jobs.steps)
        counts = {
            "vanished": int((np.isfinite(lost) & ~silent & (lost <= lasts)).sum()),
            "partial": int(partial.sum()),
        }
        record |= {name: count for name, count in counts.items() if count}
        return Closed(
            answers=[client for client, there in zip(cohort, taken.tolist(), strict=True) if there],
            limits={cohort[i]: int(steps[i]) for i in np.flatnonzero(partial)},
            record=record,
        )
