from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.registry import Registry
from prefed.round import Kept, Server, Update
from prefed.settings import Settings
from prefed.task import Task


class Engine(Protocol):
    def updates(
        self, algorithm: Algorithm, server: Server, cohort: list[int], kept: Kept
    ) -> Iterator[tuple[int, Update]]:
        """The updates of the cohort in blocks, each with the position of its first client.

        The tensors of an update are only valid until the next one is asked for.
        """


ENGINES: Registry[Callable[[Task, FederatedData, Settings], Engine]] = Registry(
    "engine", "prefed.engines"
)
