"""Clients that train in this process: on one engine, or on several in threads."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.core.memory import Memory, all_finite
from prefed.core.parts import timed
from prefed.data import FederatedData
from prefed.rules import State
from prefed.training.attackers import Attackers, Moments
from prefed.training.block_state import client_state, first_kept, kept_by
from prefed.training.engines.auto import MEASURED, Choice, Race, choose, threads_of
from prefed.training.engines.engine import Engine, check_engine, train_block
from prefed.training.engines.workers import Clients, Workers
from prefed.training.kept import InMemory, OnDisk, Store, settle
from prefed.training.kept.disk import PLACES
from prefed.training.kept.estimate import Where
from prefed.training.kept.store import unstacked
from prefed.training.mean import Added, Mean, Rows
from prefed.training.means.choice import Means
from prefed.training.round import Update
from prefed.training.server_state import Server
from prefed.training.settings import Settings
from prefed.training.task import Task
from prefed.training.trainer import Arrived, Record, Trainer

if TYPE_CHECKING:
    from prefed.training.run import Run

log = logging.getLogger("prefed")
T = TypeVar("T")


SQUARE = "square"
"""Among the values of a mean: the squared norm of each client's change of the weights."""


def spread(algorithm: Algorithm, mean: State, is_plain: bool = True) -> Record:
    """Of the clients' changes of the weights: the norm of their mean, and how far they drift apart:
    the root mean square of their distances to it, relative to that norm; not of a mean that is not
    plain. Takes the mean of their squared norms out of `mean`."""
    square, change = float(mean.pop(SQUARE)), mean["weights"]
    if algorithm.mixes:
        copied = {name: value.clone() for name, value in mean.items()}
        change, is_plain = algorithm.after_mean(copied)["weights"], False
    norm, square = float(torch.linalg.vector_norm(change)), square if is_plain else math.nan
    drift = math.sqrt(max(square - norm**2, 0.0)) / norm if math.isfinite(square) and norm else None
    return {"update_norm": norm, "drift": drift}


class LocalTrainer(Trainer):
    def __init__(
        self, algorithm: Algorithm, task: Task, data: FederatedData, settings: Settings
    ) -> None:
        check_engine(settings.engine)
        self.algorithm, self.task, self.data, self.settings = algorithm, task, data, settings
        self.means = Means.of(settings.mean, settings.state_mean)
        self.attackers = Attackers.of(settings, len(data))
        self.kept: Store = InMemory()
        """The state that clients keep, for those that took part."""
        self.first_kept = first_kept(algorithm, task.flat)
        self.choice: Choice | None = None
        """Engine and workers; to go on with those of an earlier run, set them before."""
        self.workers: Workers | None = None
        self.memory, self.lent = Memory(), list[Tensor]()
        """For means, and those of its tensors that the newest mean is in."""

    @property
    def engine(self) -> str:  # type: ignore[override]
        return str(self.choice or "")

    @timed("engine choice")
    def prepare(self, run: "Run") -> None:
        """Choose the engine, and build it."""
        cohort = run.draw_cohort() or [0]  # a random size may be none
        each = max(len(cohort), self.settings.clients_per_round or 0)
        self.kept = self._settled(run.rounds_left * each, self.settings.kept_state)
        if self.choice is None:
            self.choice = self._choose(run.server, cohort)
        if self.workers is None:
            count = min(self.choice.workers, self._at_once(cohort))  # more have nothing to do
            self.workers = Workers(self.choice.engine, count, self.task, self.data, self.settings)
            self.threads = self.choice.threads
            self.task.outputs = getattr(self.workers.engines[0], "outputs", None)
            if count > 1:  # each has one; this is for all that is done between their updates
                self.threads = threads_of(self.task, self.data, self.settings)

    def _settled(self, more: int, where: Where) -> Store:
        """Where kept state is held from now on; so many clients more may come to keep some."""
        clients = len(self.data)
        most = min(clients, len(self.kept) + more)
        sizes = self.first_kept, clients, most
        return settle(self.kept, where, *sizes, self.folder, self.task.device)

    def _at_once(self, cohort: list[int]) -> int:
        """The clients that can be trained side by side."""
        return len(cohort)

    def _choose(self, server: Server, cohort: list[int]) -> Choice:
        parts = self.task, self.data, self.settings, self.algorithm
        return choose(Race(*parts, server, cohort, self.kept))

    @timed("training, the rest")
    def train(self, server: Server, clients: list[int]) -> Arrived:
        arrived = self._train(server, clients)
        if arrived.is_finite or self.settings.on_divergence == "stop":
            return arrived
        # Clients are trained anew to find those whose update is not finite, and once more without
        # them: it is rare, the rounds in which nothing is wrong pay nothing, and the round is the
        # one without them to the bit. In lockstep a client spoils the gradients of all, and the
        # round is lost.
        bad = self._not_finite(server, clients)
        for client in bad:
            text = "round %d: client %d is left out: its update is not finite"
            log.warning(text, server.round + 1, client)
        rest = [client for client in clients if client not in bad]
        if len(rest) < self.settings.quorum:
            return Arrived({}, math.nan, len(rest), record={"left_out": bad})
        arrived = self._train(server, rest)
        return replace(arrived, record={**arrived.record, "left_out": bad})

    def _train(self, server: Server, clients: list[int]) -> Arrived:
        """The mean over these clients, in a fixed order."""
        self.memory.give(self.lent)  # the server has used the mean of the last round up
        self.lent = []
        kept: dict[int, State] = {}
        mean, place = self._collect(server, clients), {c: n for n, c in enumerate(clients)}
        in_worker = self.task.device.type == "cpu"  # sums would be of its stream's memory

        def summed(block: Sequence[int], update: Update) -> tuple[Sequence[int], State, Added]:
            weights = self.settings.weights(block, self.data.size)
            norms = torch.linalg.vector_norm(update.values["weights"], dim=1, keepdim=True)
            values = update.values | {SQUARE: norms.square_()}
            rows = Rows(place[block[0]], values, weights, update.losses.tolist())
            return block, update.kept, mean.summed(rows) if in_worker else rows

        for block, stays, added in self._updates(server, clients, summed):
            mean.take(mean.summed(added) if isinstance(added, Rows) else added)
            for row, client in enumerate(block if stays else ()):
                kept[client] = {n: value[row].clone() for n, value in stays.items()}
                if self.mechanism is not None and not all(map(all_finite, kept[client].values())):
                    del kept[client]  # it counts as zero, and goes on from what it had
        return self._together(server, mean, len(clients), kept)

    def _not_finite(self, server: Server, clients: list[int]) -> list[int]:
        """The clients whose updates are not finite."""

        def not_finite(block: Sequence[int], update: Update) -> list[int]:
            finite = update.losses.isfinite()
            for value in update.values.values():
                finite &= value.flatten(1).isfinite().all(1)
            return [block[row] for row in finite.logical_not().nonzero().flatten()]

        found = self._updates(server, clients, not_finite)
        return sorted(client for bad in found for client in bad)

    def _updates(
        self, server: Server, clients: list[int], then: Callable[[Sequence[int], Update], T]
    ) -> Iterator[T]:
        """What `then` makes of the updates of the clients, block by block, in the worker that
        trained them."""
        workers = self.workers
        assert workers is not None, "prepare() comes first"
        train = partial(
            train_block, self.algorithm, server, self.kept, self.settings.seed,
            attackers=self.attackers, honest=self._honest(server, clients),
            mechanism=self.mechanism,
        )  # fmt: skip
        blocks = self._share(workers.blocks(self.algorithm, clients))
        with torch.random.fork_rng(enabled=True):
            for _, found in workers.updates(lambda engine, b: then(b, train(engine, b)), blocks):
                yield found

    def _honest(self, server: Server, clients: list[int]) -> Moments | None:
        """What the honest ones among these clients do, if liars want to know: they train twice."""
        if self.attackers is None or not self.attackers.attack.colludes:
            return None
        honest = [client for client in clients if not self.attackers.lies(client)]
        workers = self.workers
        if workers is None or not honest:
            return None
        mean = Mean()
        like = {"mean": server.weights.double(), "square": server.weights.double()}

        def changes(engine: Engine, block: Sequence[int]) -> Update:
            return engine.update(self.algorithm, server, block, kept_by(self.kept, block))

        with torch.random.fork_rng(enabled=True):
            blocks = self._share(workers.blocks(self.algorithm, honest))
            for first, update in workers.updates(changes, blocks):
                rows = update.values["weights"].double()
                numbers = [1.0] * len(rows)
                mean.add_block(first, {"mean": rows, "square": rows.square()}, numbers, numbers)
        found, _ = self._result(mean, like)
        spread = (found["square"] - found["mean"].square()).clamp_(min=0).sqrt_()
        return Moments(found["mean"], spread)

    # What several ranks do together, and one process does alone.

    def _collect(self, server: Server, clients: list[int]) -> Mean:
        """An empty mean for these clients."""
        seed = self.settings.seed
        return self.means.collect(self.algorithm, server, len(clients), seed, self.memory)

    def _share(self, blocks: Sequence[Clients]) -> Sequence[Clients]:
        """The blocks that this process trains."""
        return blocks

    def _together(
        self, server: Server, mean: Mean, clients: int, kept: dict[int, State]
    ) -> Arrived:
        """What arrived, from what this process has."""
        values, loss = mean.result()
        self.lent = [*values.values()]
        record = spread(self.algorithm, values, self.means.weights.rule.is_plain)
        return Arrived(values, loss, clients, kept, record)

    def _result(self, mean: Mean, like: State) -> tuple[State, float]:
        return mean.result()

    # Between rounds

    def keep(self, server: Server, arrived: Arrived) -> None:
        if arrived.kept:
            self.kept.put(server.round + 1, arrived.kept)

    def rest(self) -> None:
        self.memory, self.lent = Memory(), []
        if self.workers is not None:
            self.workers.rest()

    def client_state(self, server: Server, client: int) -> tuple[Tensor, Tensor]:
        return client_state(server, self.kept.get(client, {}))

    def state(self) -> dict[str, Tensor]:
        return self.kept.state()

    def saved(self, round: int) -> None:
        self.kept.saved(round)

    def load_state(self, saved: Mapping[str, Tensor], engine: str) -> None:
        self.choice = Choice.parse(engine) if engine else None
        if self.choice is not None and self.choice.engine not in (self.settings.engine, *MEASURED):
            raise ValueError(f"{self.choice.engine!r} is not its engine")
        workers = self.settings.workers  # of one, "auto" may have made more
        ours = workers > 1 or self.settings.engine != "auto"
        if self.choice is not None and self.choice.threads == 1 and ours:  # the same bits
            self.choice = replace(self.choice, workers=workers)
        clients, device = len(self.data), self.task.device
        if PLACES not in saved:
            self.kept = unstacked(saved, self.first_kept, device)
        elif self.folder is not None:
            self.kept = OnDisk(self.folder, self.first_kept, clients, device, saved)
        else:
            raise PrefedError(
                "what clients keep is in a file of the run's directory; resume the run there"
            )
