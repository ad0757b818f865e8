"""What holds the state that clients keep, and the plain way: in memory, copied into checkpoints."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.rules import State
from prefed.training.trainer import check_fits

CLIENTS = "kept.clients"
"""In a checkpoint: the clients that have taken part, in ascending order."""


class Store(Mapping[int, State]):
    """By client, for those that have taken part. Read by several threads, written by one while
    nobody reads."""

    @abstractmethod
    def put(self, round: int, kept: Mapping[int, State]) -> None:
        """What these clients keep after that round, counted from 1."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """For a checkpoint of the newest round. What it names is on the disk."""

    def saved(self, round: int) -> None:
        """The checkpoint of that round is whole, and of those before only the newest is left."""


class InMemory(dict[int, State], Store):
    def put(self, round: int, kept: Mapping[int, State]) -> None:
        self.update(kept)

    def state(self) -> dict[str, Tensor]:
        return stacked(self)


def stacked(kept: Mapping[int, State]) -> dict[str, Tensor]:
    """All of it, as checkpoints hold it."""
    clients = sorted(kept)
    if not clients:
        return {}
    found = [kept[client] for client in clients]
    values = {f"kept.{name}": torch.stack([state[name] for state in found]) for name in found[0]}
    return {CLIENTS: torch.tensor(clients)} | values


def unstacked(saved: Mapping[str, Tensor], like: State, device: torch.device) -> InMemory:
    """What a checkpoint holds, if it fits; `like` is what one client keeps."""
    clients: list[int] = saved[CLIENTS].tolist() if CLIENTS in saved else []
    likes = {n: v.expand(len(clients), *v.shape) for n, v in like.items()}
    rows = {n: check_fits(f"kept.{n}", saved, v) for n, v in likes.items() if clients}
    return InMemory(
        (client, {name: values[row].to(device).clone() for name, values in rows.items()})
        for row, client in enumerate(clients)
    )


def numbers_in(saved: Mapping[str, Tensor], name: str, most: int) -> Tensor:
    """The tensor of that name, of different numbers from 0 to below `most`."""
    found = saved.get(name)
    if found is not None and found.dtype == torch.int64 and found.dim() == 1:
        inside = not len(found) or (int(found.min()) >= 0 and int(found.max()) < most)
        if inside and len(found.unique()) == len(found):
            return found
    raise PrefedError(f"the saved state does not fit this run: {name}")
