"""What an engine is, and what happens to a block of clients in it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, did_you_mean
from prefed.core.registry import Registry
from prefed.data import FederatedData
from prefed.training.attackers import Attackers, Moments
from prefed.training.block_state import kept_by
from prefed.training.mechanism import Mechanism
from prefed.training.messages import exchange, to_mean
from prefed.training.round import Update
from prefed.training.server_state import Kept, Server
from prefed.training.settings import Settings
from prefed.training.task import Task


class EngineWarning(UserWarning):
    """The run goes another way than was asked for, because its model does not allow it."""


class Engine(Protocol):
    """How a block of clients trains, on one instance of the model."""

    def block_size(self, algorithm: Algorithm, cohort: int) -> int:
        """How many clients of a cohort to take at a time. Must not depend on the number of
        workers: the bits of a run do not."""

    def update(
        self, algorithm: Algorithm, server: Server, clients: Sequence[int], kept: Kept
    ) -> Update:
        """The update of a block. Its tensors are valid until the next call."""


ENGINES: Registry[Callable[[Task, FederatedData, Settings], Engine]] = Registry(
    "engine", "prefed.training.engines"
)


def check_engine(name: str) -> None:
    """Raise if no engine has that name."""
    if ":" in name:
        ENGINES.get(name)
    elif name in ("gpu", "cuda", "mps"):
        raise PrefedError(f"engine: {name!r} is no engine; a GPU is a device: set device=cuda")
    elif name not in (known := [*ENGINES.names(), "auto"]):
        raise PrefedError(f"engine: unknown engine {name!r}{did_you_mean(name, known)}")


def train_block(
    algorithm: Algorithm,
    server: Server,
    kept: Kept,
    seed: int,
    engine: Engine,
    clients: Sequence[int],
    attackers: Attackers | None = None,
    honest: Moments | None = None,
    mechanism: Mechanism | None = None,
) -> Update:
    """A block of clients, from the broadcast to what the server averages."""
    ways = attackers, honest, mechanism
    update = receive_block(algorithm, server, kept, seed, engine, clients, *ways)
    update = as_averaged(algorithm, update)
    if mechanism is None:
        return update
    # Clipped, once it is decoded; losses have no noise, so nobody's is told.
    values = mechanism.contributions(server, update.values)
    return replace(update, values=values, losses=torch.zeros_like(update.losses))


def receive_block(
    algorithm: Algorithm,
    server: Server,
    kept: Kept,
    seed: int,
    engine: Engine,
    clients: Sequence[int],
    attackers: Attackers | None = None,
    honest: Moments | None = None,
    mechanism: Mechanism | None = None,
) -> Update:
    """A block of clients, from the broadcast to what the server has received."""
    kept = kept_by(kept, clients)
    update = engine.update(algorithm, server, clients, kept)  # local steps
    if attackers is not None:
        update = attackers.send(algorithm, server, update, clients, honest)
    if mechanism is not None:
        update = mechanism.on_clients(server, update, clients)  # if they trust nobody
    way = algorithm, server, update, clients, kept, seed
    values, stays = exchange(*way, getattr(engine, "hands", None))  # by the codecs
    return replace(update, values=values, kept=stays)


def as_averaged(algorithm: Algorithm, update: Update) -> Update:
    """What the server averages of what it has received."""
    steps = torch.tensor(update.steps, dtype=torch.float64, device=update.losses.device)
    return replace(update, values=to_mean(algorithm, update.values, steps.unsqueeze(1)))
