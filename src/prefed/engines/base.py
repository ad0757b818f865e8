from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.registry import Registry
from prefed.round import Kept, Server, Update
from prefed.settings import Settings
from prefed.task import Task


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
    "engine", "prefed.engines"
)
