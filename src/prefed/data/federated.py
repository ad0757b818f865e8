"""Samples, and samples divided among clients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels

Transform = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, np.random.Generator], Tensor]
"""A batch of x and a generator keyed to it -> the batch with random changes."""


class Samples:
    """Inputs and targets, all of them or those that `index` names. Nothing is copied."""

    def __init__(self, x: Any, y: Any, index: Tensor | None = None) -> None:
        self.x, self.y, self.index = torch.as_tensor(x), torch.as_tensor(y), index

    def __len__(self) -> int:
        return len(self.x) if self.index is None else len(self.index)

    def numbers(self, index: Tensor) -> Tensor:
        """Where in x and y the samples lie that `index` names."""
        return index if self.index is None else self.index.index_select(0, index)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        index = self.numbers(index)
        return self.x.index_select(0, index), self.y.index_select(0, index)

    def all(self) -> tuple[Tensor, Tensor]:
        if self.index is None:
            return self.x, self.y
        return self.x.index_select(0, self.index), self.y.index_select(0, self.index)


class Clients(Protocol):
    """Clients by number: samples, or a pair (x, y), made when it is asked for."""

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
        self.whole = Samples(x, y)
        self.parts = Parts.of(parts)
        self.ends = self.parts.ends
        self.order = torch.from_numpy(self.parts.order.astype(np.int64, copy=False))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client: int) -> Samples:
        if not 0 <= client < len(self):
            raise IndexError(client)
        start = int(self.ends[client - 1]) if client else 0
        return Samples(self.whole.x, self.whole.y, self.order[start : int(self.ends[client])])


class FederatedData:
    """What a run trains on: the clients' samples, and a test set.

    clients    pairs (x, y), or anything with len() that gives such a pair for a client number
    test       a pair (x, y), or None for a run without evaluation
    transform  applied to each batch of x on its way to the model, so that x can stay uint8
    augment    applied to each batch of x before that, in training only: (x, generator) -> x
    """

    def __init__(
        self,
        clients: Clients,
        test: Any = None,
        transform: Transform | None = None,
        augment: Augment | None = None,
    ) -> None:
        if len(clients) == 0:
            raise PrefedError("clients: there is none")
        self.clients = clients
        self.test = None if test is None else _samples(test, "test")
        self.transform = transform
        self.augment = augment

    def __len__(self) -> int:
        return len(self.clients)

    def client(self, number: int) -> Samples:
        return _samples(self.clients[number], f"clients[{number}]")

    def check(self, classes: int | None, ignored: int | None = None, targets: bool = True) -> None:
        """Raise for what would go wrong later. Clients made on demand are checked on demand.

        classes   how many there are, if y is to hold labels
        ignored   a label that stands for no class
        targets   whether y is looked at
        """
        for where, samples in self._checkable():
            _check(where, samples, classes, ignored, targets)
        kinds = {(s.x.dtype, s.y.dtype) for _, s in self._checkable()}
        if len(kinds) > 1:
            found = " and ".join(sorted(f"({x}, {y})" for x, y in kinds))
            raise PrefedError(f"clients, test: (x, y) must have the same dtypes, found {found}")

    def _checkable(self) -> Iterator[tuple[str, Samples]]:
        if isinstance(self.clients, Partition):
            sizes = np.diff(self.clients.ends, prepend=0)
            if not sizes.all():
                raise PrefedError(f"clients[{int(np.argmin(sizes))}]: it has no samples")
            yield "clients", self.clients.whole
        elif isinstance(self.clients, list | tuple):
            for number in range(len(self.clients)):
                yield f"clients[{number}]", self.client(number)
        if self.test is not None:
            yield "test", self.test


def _samples(item: Any, where: str) -> Samples:
    if isinstance(item, Samples):
        return item
    try:
        x, y = item
        samples = Samples(x, y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PrefedError(f"{where}: should be a pair (x, y) of arrays: {error}") from None
    if samples.x.dim() == 0 or len(samples.x) != len(samples.y):
        raise PrefedError(f"{where}: x and y should have the same number of samples")
    return samples


def _check(
    where: str, samples: Samples, classes: int | None, ignored: int | None, targets: bool
) -> None:
    x, y = samples.x, samples.y
    if len(samples) == 0:
        raise PrefedError(f"{where}: it has no samples")
    for name, values in (("x", x), ("y", y)) if targets else (("x", x),):
        if values.dtype.is_floating_point and not bool(torch.isfinite(values).all()):
            raise PrefedError(f"{where}: {name} has values that are not finite (NaN or infinity)")
    if classes is not None and targets and are_labels(y):
        if ignored is not None:
            y = y[y != ignored]
        low, high = (int(y.min()), int(y.max())) if y.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise PrefedError(
                f"{where}: labels reach from {low} to {high}, "
                f"but the model has outputs for labels 0 to {classes - 1}"
            )
