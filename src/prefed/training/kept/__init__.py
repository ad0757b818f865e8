"""Where the state that clients keep is held while a run goes on: in memory, or in a file."""

from prefed.training.kept.disk import OnDisk
from prefed.training.kept.estimate import settle
from prefed.training.kept.store import InMemory, Store

__all__ = ["InMemory", "OnDisk", "Store", "settle"]
