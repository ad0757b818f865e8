"""Samples, and samples divided among clients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from prefed.core import draws
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
    client_tests  test samples of each client, in the form of `clients`, to evaluate clients one by
               one; see also `hold_out`
    """

    def __init__(
        self,
        clients: Clients,
        test: Any = None,
        transform: Transform | None = None,
        augment: Augment | None = None,
        client_tests: Clients | None = None,
    ) -> None:
        if len(clients) == 0:
            raise PrefedError("clients: there is none")
        if client_tests is not None and len(client_tests) != len(clients):
            raise PrefedError(
                f"client_tests: {len(client_tests)} for {len(clients)} clients; give one for each, "
                f"with no samples where a client has none"
            )
        self.clients, self.client_tests = clients, client_tests
        self.test = None if test is None else _samples(test, "test")
        self.transform = transform
        self.augment = augment

    def __len__(self) -> int:
        return len(self.clients)

    def client(self, number: int) -> Samples:
        return _samples(self.clients[number], f"clients[{number}]")

    def client_test(self, number: int) -> Samples:
        assert self.client_tests is not None
        return _samples(self.client_tests[number], f"client_tests[{number}]")

    def hold_out(self, share: float, seed: int = 0) -> "FederatedData":
        """The same with this share of each client's samples, drawn by the seed, as its own test
        samples. A client with a single sample keeps it, and has none to be tested on."""
        if not 0 < share < 1:
            raise PrefedError(f"share: should lie between 0 and 1, not {share}")
        rest, tests = (_part_of(self, share, seed, part) for part in (1, 0))
        return FederatedData(rest, self.test, self.transform, self.augment, tests)

    def check(self, classes: int | None) -> None:
        """Raise for what would go wrong later. Clients made on demand are checked on demand."""
        for where, samples in self._checkable():
            _check(where, samples, classes)
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
        elif isinstance(self.clients, HeldOut):
            yield from self.clients.data._checkable()
            return
        elif isinstance(self.clients, list | tuple):
            for number in range(len(self.clients)):
                yield f"clients[{number}]", self.client(number)
        if self.test is not None:
            yield "test", self.test
        if isinstance(self.client_tests, list | tuple):
            for number in range(len(self.client_tests)):
                if len(samples := self.client_test(number)):
                    yield f"client_tests[{number}]", samples
        elif isinstance(self.client_tests, Partition) and len(self.client_tests.whole):
            yield "client_tests", self.client_tests.whole


class HeldOut(Sequence[Samples]):
    """Clients with a part of their samples: those that are held out (0), or the rest (1)."""

    def __init__(self, data: FederatedData, share: float, seed: int, part: int) -> None:
        self.data, self.share, self.seed, self.part = data, share, seed, part

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < len(self):
            raise IndexError(client)
        samples = self.data.client(client)
        drawn = draws.held_out(self.seed, client, len(samples), self.share)[self.part]
        return Samples(samples.x, samples.y, samples.numbers(torch.from_numpy(drawn)))


def _part_of(data: FederatedData, share: float, seed: int, part: int) -> Clients:
    clients = data.clients
    if not isinstance(clients, Partition):
        return HeldOut(data, share, seed, part)
    numbers = [
        own[draws.held_out(seed, client, len(own), share)[part]]
        for client, own in enumerate(clients.parts)
    ]
    return Partition(clients.whole.x, clients.whole.y, numbers)


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


def _check(where: str, samples: Samples, classes: int | None) -> None:
    x, y = samples.x, samples.y
    if len(samples) == 0:
        raise PrefedError(f"{where}: it has no samples")
    for name, values in (("x", x), ("y", y)):
        if values.dtype.is_floating_point and not bool(torch.isfinite(values).all()):
            raise PrefedError(f"{where}: {name} has values that are not finite (NaN or infinity)")
    if classes is not None and are_labels(y):
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= classes:
            raise PrefedError(
                f"{where}: labels reach from {low} to {high}, "
                f"but the model has outputs for labels 0 to {classes - 1}"
            )
