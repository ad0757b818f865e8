"""What an asynchronous run holds for clients in flight: versions to begin with, and updates that
were trained before they arrive: for each client one of either, or both where an update can be used
only beside the version that it began with (SCAFFOLD, mix="models")."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.rules import State
from prefed.training.asynchronous import Asynchronous
from prefed.training.events import Job
from prefed.training.round import Update
from prefed.training.server_state import Server
from prefed.training.stale import frozen, needs_beginning
from prefed.training.trainer import check_fits


@dataclass(frozen=True, eq=False)
class Waiting:
    """A block of clients that is not trained yet, in the order of their arrival."""

    version: int
    clients: Sequence[int]


@dataclass(frozen=True, eq=False)
class Held:
    """The update of a client, which was trained with its block."""

    version: int
    block: int
    """The first client of the block."""
    row: int
    """Its place in the block."""
    update: Update
    """One row."""


class Underway:
    def __init__(
        self, algorithm: Algorithm, rule: Asynchronous, like: Server, first_kept: State
    ) -> None:
        self.algorithm, self.like, self.first_kept = algorithm, like, first_kept
        self.needs_beginning = needs_beginning(algorithm, rule)
        self.versions: dict[int, Server] = {}
        """That clients in flight began with, but for the newest."""
        self.waiting: list[Waiting] = []
        self.held: dict[int, Held] = {}

    def values(self, version: int) -> State:
        """Names, types and shapes of what is sent by clients that begin with that version."""
        return replace(self.like, round=version).values(self.algorithm)

    def step(self, server: Server, used: Collection[int], fresh: Sequence[Waiting]) -> None:
        """The updates of these clients are used, and the server is about to change. `fresh` are the
        blocks that began with what it is now."""
        done = {*used, *self.held}
        blocks = (*self.waiting, *fresh)
        self.waiting = [block for block in blocks if done.isdisjoint(block.clients)]
        self.held = {client: row for client, row in self.held.items() if client not in used}
        needed = self._needed()
        self.versions = {v: began for v, began in self.versions.items() if v in needed}
        if server.round in needed:
            self.versions[server.round] = frozen(server)

    def _needed(self) -> set[int]:
        """The versions that are needed still."""
        held = {row.version for row in self.held.values()} if self.needs_beginning else set()
        return {block.version for block in self.waiting} | held

    # On disk

    def state(self, jobs: Sequence[Job]) -> dict[str, Tensor]:
        """As a checkpoint holds it, if these are in flight."""
        blocks = [(n, client) for n, block in enumerate(self.waiting) for client in block.clients]
        found = {"blocks": torch.tensor(blocks, dtype=torch.int64).reshape(-1, 2)}
        for version, began in self.versions.items():
            found |= {f"version.{version}.{n}": v for n, v in _parts(began).items()}
        # A step that failed may have trained more, which is not of this state.
        known = {job.client for job in jobs} - {client for _, client in blocks}
        rows = sorted((row.version, c) for c, row in self.held.items() if c in known)
        for version, group in groupby(rows, key=lambda pair: pair[0]):
            held = {client: self.held[client] for _, client in group}
            whole, name = joined([row.update for row in held.values()]), f"held.{version}"
            places = [(c, h.block, h.row, h.update.steps[0]) for c, h in held.items()]
            found |= {f"{name}.rows": torch.tensor(places), f"{name}.losses": whole.losses}
            found |= {f"{name}.values.{n}": v for n, v in whole.values.items()}
            found |= {f"{name}.kept.{n}": v for n, v in whole.kept.items()}
        return found

    def load_state(self, jobs: Sequence[Job], saved: Mapping[str, Tensor]) -> None:
        version = {job.client: job.version for job in jobs if not job.is_lost}
        blocks = groupby(saved["blocks"].tolist(), key=lambda pair: pair[0])
        names = [[client for _, client in group] for _, group in blocks]
        self.waiting = [Waiting(version[clients[0]], clients) for clients in names]
        self.held = {}
        for number in sorted({*version.values()}):
            if f"held.{number}.rows" in saved:
                self._load_held(number, saved)
        self.versions = {v: self._load_version(v, saved) for v in sorted(self._needed())}
        found = sorted([client for clients in names for client in clients] + [*self.held])
        if found != sorted(version):
            raise PrefedError("the saved state does not fit this run: updates are missing")

    def _load_version(self, version: int, saved: Mapping[str, Tensor]) -> Server:
        began = replace(frozen(self.like), round=version)
        for name, value in _parts(began).items():
            value.copy_(check_fits(f"version.{version}.{name}", saved, value))
        return began

    def _load_held(self, version: int, saved: Mapping[str, Tensor]) -> None:
        name, likes = f"held.{version}", self.values(version)
        places = saved[f"{name}.rows"].tolist()

        def rows(kind: str, likes: State) -> State:
            wide = {n: v.expand(len(places), *v.shape) for n, v in likes.items()}
            found = {n: check_fits(f"{name}.{kind}.{n}", saved, v) for n, v in wide.items()}
            return {n: value.to(self.like.weights.device) for n, value in found.items()}

        losses = check_fits(f"{name}.losses", saved, self.like.weights.new_zeros(len(places)))
        whole = Update(
            values=rows("values", likes),
            kept=rows("kept", self.first_kept),
            losses=losses.to(self.like.weights.device),
            steps=[steps for *_, steps in places],
        )
        for row, (client, block, place, _) in enumerate(places):
            self.held[client] = Held(version, block, place, part_of(whole, row, row + 1))


def runs(clients: Sequence[int], rows: Mapping[int, Held]) -> Iterator[list[int]]:
    """The clients, those together that stand next to each other in their block. Updates are put
    together so however they were come by, so that all that is computed of them has the same
    bits."""
    found: list[int] = []
    after = None
    for client in clients:
        here = rows[client]
        if found and (here.version, here.block, here.row) != after:
            yield found
            found = []
        found.append(client)
        after = here.version, here.block, here.row + 1
    if found:
        yield found


def part_of(update: Update, first: int, last: int, copied: bool = False) -> Update:
    def part(value: Tensor) -> Tensor:
        return value[first:last].clone() if copied else value[first:last]

    values, kept = ({n: part(v) for n, v in of.items()} for of in (update.values, update.kept))
    return Update(values, kept, part(update.losses), update.steps[first:last])


def joined(updates: Sequence[Update]) -> Update:
    first, *others = updates
    if not others:
        return first
    values = {n: torch.cat([u.values[n] for u in updates]) for n in first.values}
    kept = {n: torch.cat([u.kept[n] for u in updates]) for n in first.kept}
    losses = torch.cat([u.losses for u in updates])
    return Update(values, kept, losses, [steps for u in updates for steps in u.steps])


def _parts(server: Server) -> State:
    """What there is of a version."""
    shared = {f"shared.{name}": value for name, value in server.shared.items()}
    return {"weights": server.weights, "buffers": server.buffers, "steps": server.steps} | shared
