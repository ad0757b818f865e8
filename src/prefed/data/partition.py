"""Clients by number: one data set divided among them, or one for each."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from prefed.core import draws
from prefed.core.errors import PrefedError, shown
from prefed.data.samples import LazySamples, Read, Samples, to_samples


class Clients(Protocol):
    """Clients by number: a pair (x, y) or a data set each, made when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Any: ...


class Parts(Sequence["np.ndarray[Any, Any]"]):
    """The sample numbers of each client, as two arrays: all of them in the order of the clients,
    and where each client's end. A million clients cost no more than that."""

    def __init__(self, order: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
        self.order, self.ends = order, ends

    @classmethod
    def of(cls, parts: Sequence[np.ndarray[Any, Any]]) -> "Parts":
        if isinstance(parts, Parts):
            return parts
        ends = np.cumsum([len(part) for part in parts])
        return cls(np.concatenate(list(parts)).astype(np.int64), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[c] for c in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(client)
        client %= len(self)
        return self.order[int(self.ends[client - 1]) if client else 0 : int(self.ends[client])]

    def sizes(self) -> np.ndarray[Any, Any]:
        return np.diff(self.ends, prepend=0)


class Partition:
    """One data set divided among clients: the arrays, and for each client its sample numbers."""

    def __init__(self, x: Any, y: Any, parts: Sequence[np.ndarray[Any, Any]]) -> None:
        self._divide(Samples(x, y), parts)

    @classmethod
    def of(cls, whole: Samples, parts: Sequence[np.ndarray[Any, Any]]) -> "Partition":
        made = cls.__new__(cls)
        made._divide(whole, parts)
        return made

    def _divide(self, whole: Samples, parts: Sequence[np.ndarray[Any, Any]]) -> None:
        self.whole = whole
        self.parts = Parts.of(parts)
        self.ends = self.parts.ends
        self.order = torch.from_numpy(self.parts.order.astype(np.int64, copy=False))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client: int) -> Samples:
        if not 0 <= client < len(self):
            raise IndexError(client)
        start = int(self.ends[client - 1]) if client else 0
        return self.whole.part(self.order[start : int(self.ends[client])])

    def places(self, clients: Sequence[int]) -> tuple[draws.Numbers, draws.Numbers]:
        """Where in `order` the samples of each begin, and how many they are."""
        numbers = np.asarray(clients)
        if (numbers < 0).any():
            raise IndexError(int(numbers.min()))
        starts = np.where(numbers > 0, self.ends[numbers - 1], 0)
        return starts, self.ends[numbers] - starts

    @property
    def used(self) -> Samples:
        """Those that clients have; of arrays, in which all should be in order, all."""
        return self.whole.part(self.order) if isinstance(self.whole, LazySamples) else self.whole

    def owner(self, number: int) -> int:
        """The first client that has the sample of this number."""
        place = int(np.flatnonzero(self.parts.order == number)[0])
        return int(np.searchsorted(self.ends, place, side="right"))


class Partitions:
    """The clients of a partitioner of flwr-datasets, each loaded once."""

    def __init__(self, partitioner: Any) -> None:
        self.partitioner = partitioner
        self._loaded: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self.partitioner.num_partitions)

    def __getitem__(self, client: int) -> Any:
        if client not in self._loaded:
            self._loaded[client] = self.partitioner.load_partition(client)
        return self._loaded[client]


class MadeOnce:
    """Clients that are made on demand, each held once it is made."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self._made: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: int) -> Any:
        if client not in self._made:
            self._made[client] = self.clients[client]
        return self._made[client]


def sample_numbers(client: int, part: Any, samples: int) -> np.ndarray[Any, Any]:
    """Of one client, who is given them, or a mask with a yes or no for each sample."""
    if np.ndim(part) == 0:
        raise PrefedError(
            f"parts[{client}]: should be a list of sample numbers or a mask, not {shown(part)}"
        )
    found = np.asarray(part).reshape(-1)
    if found.dtype == bool:
        if len(found) != samples:
            raise PrefedError(
                f"parts[{client}]: a mask of {len(found)} for {samples} samples; give a yes or no "
                f"for each, or sample numbers"
            )
        return np.flatnonzero(found)
    if len(found) and not np.issubdtype(found.dtype, np.integer):
        raise PrefedError(
            f"parts[{client}]: should be sample numbers or a mask, not {found.dtype} numbers"
        )
    return found.astype(np.int64)


def _are_samples(value: Any) -> bool:
    """An array that is no pair."""
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0 and len(value) != 2


def divide(clients: Any, parts: Sequence[Any] | None, read: Read) -> Clients:
    """Clients by number, from what the user gave."""
    if parts is not None:
        whole = to_samples(clients, "clients", read)
        if isinstance(parts, Mapping):
            raise PrefedError(
                "parts: is a dict; give list(parts.values()), a client for each place"
            )
        if not len(parts):
            raise PrefedError("parts: there is no client")
        if not isinstance(parts, Parts):
            parts = Parts.of([sample_numbers(n, part, len(whole)) for n, part in enumerate(parts)])
        low, high = int(parts.order.min(initial=0)), int(parts.order.max(initial=0))
        if low < 0 or high >= len(whole):
            raise PrefedError(
                f"parts: sample numbers reach from {low} to {high}, but there are "
                f"{len(whole)} samples, counted from 0"
            )
        if whole.index is not None:  # a part itself
            order = whole.index.numpy()[parts.order]
            whole, parts = whole.part(None), Parts(order, parts.ends)
        return Partition.of(whole, parts)
    if hasattr(clients, "load_partition") and hasattr(clients, "num_partitions"):
        return Partitions(clients)
    if hasattr(clients, "column_names"):
        raise PrefedError(
            "clients: this is one data set; give a list with one for each client, "
            "or `parts`, the sample numbers of each"
        )
    if isinstance(clients, Mapping):
        raise PrefedError(
            "clients: is a dict; give list(clients.values()), a client for each place"
        )
    if isinstance(clients, tuple) and len(clients) == 2 and all(map(_are_samples, clients)):
        raise PrefedError(
            "clients: is one pair (x, y); give a list with a pair for each client, or `parts`, the "
            "sample numbers of each"
        )
    if not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
        raise PrefedError(
            f"clients: {type(clients).__name__} has no len(), or no clients by number; give a list"
        )
    found: Clients = clients
    return found
