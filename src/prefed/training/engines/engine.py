"""What an engine is, and what happens to a block of clients in it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, did_you_mean
from prefed.core.registry import Registry
from prefed.data import FederatedData
from prefed.training.mechanism import Mechanism
from prefed.training.messages import receive, to_mean, upload
from prefed.training.round import Kept, Server, Update
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
    mechanism: Mechanism | None = None,
) -> Update:
    """A block of clients, from the broadcast to what the server averages."""
    update = engine.update(algorithm, server, clients, kept)  # local steps
    if mechanism is not None:
        update = mechanism.on_clients(server, update, clients)  # if they trust nobody
    message, stays = upload(algorithm, server, update, clients, kept, seed)  # encoded
    values = receive(algorithm, server, message)  # decoded, on the server
    steps = torch.tensor(update.steps, dtype=torch.float64, device=server.weights.device)
    values = to_mean(algorithm, values, steps.unsqueeze(1))
    if mechanism is not None:  # clipped, once it is decoded; losses have no noise, so nobody's is
        values, losses = mechanism.contributions(server, values), torch.zeros_like(update.losses)
        update = replace(update, losses=losses)
    return replace(update, values=values, kept=stays)
