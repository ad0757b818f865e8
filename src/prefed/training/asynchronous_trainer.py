"""Clients of an asynchronous run, in this process: trained when their updates are needed.

The events (events.py) say who is in the buffer; they depend on nothing that is trained. All clients
that began with a version are known when the server steps away from it. They are then cut into
blocks by the order of their arrival, and a block is trained when the first of its updates is
needed, or when a worker would have nothing to do otherwise. So the blocks, and with them the bits,
depend neither on the number of workers nor on where a run was interrupted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.core.machine import torch_threads
from prefed.data import FederatedData
from prefed.training.clock import Clock
from prefed.training.engines.engine import Engine, as_averaged, receive_block
from prefed.training.events import Events, Filled, Job, Population, Work
from prefed.training.local_trainer import LocalTrainer
from prefed.training.round import Update
from prefed.training.server_state import Server
from prefed.training.settings import Settings
from prefed.training.stale import brought_up_to_date, with_all
from prefed.training.task import Task
from prefed.training.traffic import traffic
from prefed.training.trainer import Arrived, Record
from prefed.training.underway import Held, Underway, Waiting, joined, part_of, runs

T = TypeVar("T")

NAME = "asynchronous."
"""What the names of the state in a checkpoint begin with."""


class AsynchronousTrainer(LocalTrainer):
    is_asynchronous = True

    def __init__(
        self, algorithm: Algorithm, task: Task, data: FederatedData, settings: Settings
    ) -> None:
        super().__init__(algorithm, task, data, settings)
        assert settings.asynchronous is not None
        self.rule = settings.asynchronous
        buffer = self.rule.buffer or settings.clients_per_round or len(data)
        concurrency = self.rule.concurrency or buffer
        check(algorithm, settings, len(data), buffer, concurrency)
        if self.attackers is not None and self.attackers.attack.colludes:
            raise PrefedError(
                "attackers: clients of an asynchronous run cannot collude, since they do not train "
                "at the same time; take another attack"
            )
        flat = task.flat
        self.like = Server.start(algorithm, flat.shared, flat.weights, flat.read_buffers())
        """A server, for the shapes of what it has."""
        assert settings.devices is not None
        self.clock = Clock(settings.devices, algorithm, task, data, settings)
        people = settings.seed, len(data), buffer, concurrency
        timeless = self.clock.always_on and settings.devices.trace is None
        until_on = None if timeless else self._until_on
        self.events = Events(Population(*people, self._work, until_on))
        """As they are between two steps of the server."""
        self.ahead, self.filled = self.events, Filled()
        """As they are when the next buffer is full, and what happened until then."""
        self.underway = Underway(algorithm, self.rule, self.like, self.first_kept)
        self.fresh: list[Waiting] = []
        """The blocks that began with the newest version."""

    # Who

    def arrivals(self, server: Server) -> list[int]:
        """The clients of the next buffer; those of one version together, as they arrived. Nothing
        is changed yet: the step may fail."""
        self.ahead = self.events.copy()
        self.filled = self.ahead.fill_buffer(server.round)
        self.fresh = []
        return [job.client for job in sorted(self.filled.buffer, key=_by_version)]

    def _work(self, version: int, clients: Sequence[int], now: float) -> list[Work]:
        """What becomes of clients that begin now with that version."""
        seed, dropout = self.settings.seed, self.settings.client_dropout
        jobs = self.clock.jobs(replace(self.like, round=version), version, [*clients], now)
        ends = jobs.seconds()
        lost = self.clock.devices.lost(seed, version, clients, ends, now)
        if dropout:
            answers = draws.answering(seed, version, [*clients], dropout)
            lost = np.where(np.isin(clients, answers), lost, np.minimum(lost, jobs.there))
        is_lost = np.isfinite(lost)
        wasted = np.where(is_lost, jobs.sent_before(ends, lost), 0)
        found = (part.tolist() for part in (is_lost, wasted, np.minimum(ends, lost)))
        return [*zip(*found, strict=True)]

    def _until_on(self, now: float, clients: Sequence[int]) -> Sequence[float]:
        found: list[float] = self.clock.devices.until_on(self.settings.seed, now, clients).tolist()
        return found

    def _traffic(self, version: int) -> dict[str, int]:
        """Of a client that begins with that version."""
        return traffic(self.algorithm, replace(self.like, round=version), 1, 0)

    def _at_once(self, cohort: list[int]) -> int:
        return self.events.who.concurrency

    def told(self, server: Server) -> Record:
        buffer, invited = self.filled.buffer, self.filled.invited
        ages = [server.round - job.version for job in buffer]
        now = self._traffic(server.round)
        record: Record = {name: invited * sent for name, sent in now.items() if "down" in name}
        each = {version: self._traffic(version) for version in {job.version for job in buffer}}
        for name in (name for name in now if "up" in name):
            record[name] = sum(each[job.version][name] for job in buffer)
        if ages:
            record |= {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)}
        lost, used = self.filled.lost, sorted(buffer, key=_by_version)
        if lost:
            record["dropped"] = sorted(job.client for job in lost)
        busy = [float(np.sum([job.seconds for job in jobs])) for jobs in (used + lost, lost)]
        return record | {
            "seconds_virtual": self.ahead.now,
            "device_seconds": busy[0],
            "wasted_device_seconds": busy[1],
            "wasted_bytes_up": sum(job.wasted for job in lost),
            "wasted_bytes_down": sum(self._traffic(job.version)["bytes_down"] for job in lost),
        }

    # Train

    def _updates(
        self, server: Server, clients: list[int], then: Callable[[Sequence[int], Update], T]
    ) -> Iterator[T]:
        """What `then` makes of the updates in the buffer, as the server of now averages them."""
        assert self.workers is not None, "prepare() comes first"
        # With several workers, a block that is alone is computed as it is beside others.
        with torch_threads(1 if self.workers.count > 1 else None):
            for first, update in self._in_buffer(server, clients):
                yield then(clients[first : first + len(update.losses)], update)

    def _in_buffer(self, server: Server, clients: list[int]) -> Iterator[tuple[int, Update]]:
        self.fresh = self.fresh or self._cut(server.round)
        held, places = self.underway.held, {c: place for place, c in enumerate(clients)}
        servers = self.underway.versions | {server.round: server}
        versions = sorted({job.version for job in self.filled.buffer if job.client in places})
        sent = [name for version in versions for name in self.underway.values(version)]
        names = [*dict.fromkeys(sent)]

        def finished(first: int, update: Update, version: int) -> tuple[int, Update]:
            which = server, version, servers.get(version)
            values = brought_up_to_date(self.algorithm, self.rule, *which, update.values)
            update = replace(update, values=with_all(names, server, values))
            return places[first], as_averaged(self.algorithm, update)

        ready = [client for client in clients if client in held]
        for mine in runs(ready, held):
            update = joined([held[client].update for client in mine])
            yield finished(mine[0], update, held[mine[0]].version)

        of = {c: block for block in (*self.underway.waiting, *self.fresh) for c in block.clients}
        wanted = dict.fromkeys(of[client] for client in clients if client not in held)
        for block, update in self._trained([*wanted], servers):
            here = {}
            for row, client in enumerate(block.clients):
                found = Held(block.version, block.clients[0], row, update)
                if client in places:
                    here[client] = found
                else:
                    held[client] = replace(found, update=part_of(update, row, row + 1, copied=True))
            for mine in runs([*here], here):
                row = here[mine[0]].row
                yield finished(mine[0], part_of(update, row, row + len(mine)), block.version)

    def _cut(self, version: int) -> list[Waiting]:
        """The blocks of the newest version: all that began with it are known."""
        assert self.workers is not None, "prepare() comes first"
        known = (*self.filled.buffer, *self.ahead.in_flight)
        jobs = sorted(job for job in known if job.version == version and not job.is_lost)
        parts = self.workers.blocks(self.algorithm, [job.client for job in jobs]) if jobs else []
        return [Waiting(version, clients) for _, clients in parts]

    def _trained(
        self, blocks: list[Waiting], servers: Mapping[int, Server]
    ) -> Iterator[tuple[Waiting, Update]]:
        """These blocks, and as many more as keep all workers busy: those that are needed first."""
        assert self.workers is not None, "prepare() comes first"
        if more := -len(blocks) % self.workers.count:
            arrival = {job.client: job for job in self.ahead.in_flight}
            others = {*self.underway.waiting, *self.fresh} - {*blocks}
            others = {b for b in others if b.clients[0] not in self.underway.held}
            blocks += sorted(others, key=lambda block: arrival[block.clients[0]])[:more]
        version = {block.clients[0]: block.version for block in blocks}

        def train(engine: Engine, clients: Sequence[int]) -> Update:
            began = servers[version[clients[0]]]
            parts = self.algorithm, began, self.kept, self.settings.seed
            return receive_block(*parts, engine, clients, self.attackers)

        numbered = [(number, block.clients) for number, block in enumerate(blocks)]
        with torch.random.fork_rng(enabled=True):
            for number, update in self.workers.updates(train, numbered):
                yield blocks[number], update

    # Between two steps

    def keep(self, server: Server, arrived: Arrived) -> None:
        super().keep(server, arrived)
        self.skip(server)

    def skip(self, server: Server) -> None:
        """This buffer is used, and the next begins."""
        self.underway.step(server, [job.client for job in self.filled.buffer], self.fresh)
        self.events, self.fresh = self.ahead, []

    def state(self) -> dict[str, Tensor]:
        found = super().state()
        if self.events.jobs:
            own = self.events.state() | self.underway.state(self.events.in_flight)
            found |= {NAME + name: value for name, value in own.items()}
        return found

    def load_state(self, saved: Mapping[str, Tensor], engine: str) -> None:
        super().load_state(saved, engine)
        own = {n.removeprefix(NAME): v for n, v in saved.items() if n.startswith(NAME)}
        if own:
            if missing := {"times", "jobs", "blocks"} - own.keys():
                raise PrefedError(f"the saved state does not fit this run: {min(missing)}")
            self.events.load_state(own["times"], own["jobs"])
            self.underway.load_state(self.events.in_flight, own)


def check(
    algorithm: Algorithm, settings: Settings, clients: int, buffer: int, concurrency: int
) -> None:
    """Refuse what has no meaning here."""
    if algorithm.client_rule().lockstep:
        raise PrefedError(
            f"asynchronous: clients of {type(algorithm).__name__} meet in every step, so that "
            f"nobody can be late; take another algorithm"
        )
    for name, count in (("buffer", buffer), ("concurrency", concurrency)):
        if count > clients:
            raise PrefedError(
                f"asynchronous.{name}: {count} is more than the {clients} clients there are"
            )
    for name in ("over_selection", "deadline", "partial_work"):
        if settings.devices is not None and name in settings.devices.model_fields_set:
            raise PrefedError(
                f"devices.{name}: is of synchronous rounds; an asynchronous server waits for no one"
            )
    if settings.quorum > buffer:
        raise PrefedError(f"quorum: {settings.quorum} is more than the {buffer} of a buffer")


def _by_version(job: Job) -> tuple[int, float, int]:
    return job.version, job.time, job.number
