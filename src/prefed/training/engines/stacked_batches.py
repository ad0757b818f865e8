"""The batches of a block of clients, stacked so that one operation serves all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data import FederatedData, Samples
from prefed.data.samples import LazySamples
from prefed.training.batches import Batches, sample_numbers
from prefed.training.settings import Settings

Part = tuple[slice | Tensor, Tensor, Tensor]
"""Rows of a block, and their x and y (n, batch, ...)."""


class Stack(Protocol):
    """Clients of a block whose batches are stacked together."""

    def batches(self, k: int) -> Iterator[Part]:
        """Those of step k, which some clients may not have any more."""

    def ignores(self, y: Tensor) -> bool:
        """Some of the targets are labels of no class."""


@dataclass(frozen=True)
class Group:
    """Clients of a block whose batches have the same shape."""

    rows: slice | Tensor
    """Which rows of the block they are."""
    x: Tensor
    """(n, all samples of the round, ...)"""
    y: Tensor
    size: int | None = None
    """Samples in a batch; None if every step uses all of x and y."""

    @cached_property
    def _ignores(self) -> bool:
        return _some_ignored(self.y)

    def ignores(self, y: Tensor) -> bool:
        return self._ignores

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """x and y of step k, (n, batch, ...)."""
        if self.size is None:
            return self.x, self.y
        part = slice(k * self.size, (k + 1) * self.size)
        return self.x[:, part], self.y[:, part]

    def batches(self, k: int) -> Iterator[Part]:
        yield self.rows, *self.batch(k)


@dataclass(frozen=True)
class Unequal:
    """Clients whose batches differ in number, in size, or in how they are augmented: those of one
    step and size are stacked when it comes. None takes more steps than the one before it."""

    clients: list[Batches]

    def ignores(self, y: Tensor) -> bool:
        return _some_ignored(y)

    def batches(self, k: int) -> Iterator[Part]:
        alike: dict[torch.Size, list[tuple[int, Tensor, Tensor]]] = {}
        for row, batches in enumerate(self.clients):
            if k >= len(batches):
                break
            x, y = batches[k]
            alike.setdefault(x.shape, []).append((row, x, y))
        for found in alike.values():
            rows, xs, ys = zip(*found, strict=True)
            yield _rows(rows), torch.stack(xs), torch.stack(ys)


def gather(
    data: FederatedData,
    clients: Sequence[int],
    round: int,
    settings: Settings,
    most: int,
    device: torch.device,
) -> list[Stack]:
    """Stacks of at most `most` clients, if their batches are alike. A loss cannot be told to leave
    padding out, so full batches are grouped by size."""
    size = settings.batch_size
    if size is not None and data.augment is None and _are_equal(data, clients, settings):
        return [
            _drawn(data, clients, slice(start, start + most), round, settings, device)
            for start in range(0, len(clients), most)
        ]
    augment = data.augment
    if size is not None or augment is not None:
        batches = [Batches(data.client(c), c, round, settings, augment, device) for c in clients]
        return [Unequal(batches)]
    return [*whole_batches(data, clients, most, device)]


def whole_batches(
    data: FederatedData, clients: Sequence[int], most: int, device: torch.device
) -> Iterator[Group]:
    """All samples of each client, in groups of at most `most` clients with equally many."""
    samples = [data.client(client) for client in clients]
    alike: dict[int, list[int]] = {}
    for row, of_one in enumerate(samples):
        alike.setdefault(len(of_one), []).append(row)
    for members in alike.values():
        for start in range(0, len(members), most):
            part = members[start : start + most]
            xs, ys = zip(*(samples[row].all() for row in part), strict=True)
            yield Group(_rows(part), torch.stack(xs).to(device), torch.stack(ys).to(device))


def _are_equal(data: FederatedData, clients: Sequence[int], settings: Settings) -> bool:
    """All clients take equally many steps, in whole batches."""
    if settings.local_epochs is None:
        return True
    sizes = {len(data.client(client)) for client in clients}
    return len(sizes) == 1 and sizes.pop() % (settings.batch_size or 1) == 0


def _some_ignored(y: Tensor) -> bool:
    return are_labels(y) and bool((y < 0).any())


def _drawn(
    data: FederatedData,
    clients: Sequence[int],
    rows: slice,
    round: int,
    settings: Settings,
    device: torch.device,
) -> Group:
    """All batches of a group at once: one gather if its clients are parts of one data set."""
    clients = clients[rows]
    samples = [data.client(c) for c in clients]
    sizes = [len(s) for s in samples]
    numbers = [sample_numbers(settings, round, *of) for of in zip(clients, sizes, strict=True)]
    drawn = torch.from_numpy(np.stack(numbers))
    first, indices = samples[0], [s.index for s in samples if s.index is not None]
    if len(indices) == len(samples) and all(s.is_of(first) for s in samples):
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0).unsqueeze(1)
        x, y = first.part(torch.cat(indices)).take((starts + drawn).view(-1))
        x, y = x.unflatten(0, drawn.shape), y.unflatten(0, drawn.shape)
    else:
        if any(isinstance(s, LazySamples) for s in samples):  # read what was drawn, and no more
            samples = [Samples(*s.take(i)) for s, i in zip(samples, drawn, strict=True)]
            first, drawn = samples[0], torch.arange(drawn.shape[1]).expand(drawn.shape)
        for client, s in zip(clients, samples, strict=True):
            if _kind(s) != _kind(first):
                raise PrefedError(
                    f"clients[{client}]: its samples are not of the shape and type of those of "
                    f"clients[{clients[0]}]"
                )
        x = first.x.new_empty((*drawn.shape, *first.x.shape[1:]))
        y = first.y.new_empty((*drawn.shape, *first.y.shape[1:]))
        for s, index, x_row, y_row in zip(samples, drawn, x, y, strict=True):
            index = s.numbers(index)
            torch.index_select(s.x, 0, index, out=x_row)
            torch.index_select(s.y, 0, index, out=y_row)
    return Group(rows, x.to(device), y.to(device), settings.batch_size)


def _kind(samples: Samples) -> tuple[object, ...]:
    x, y = samples.x, samples.y
    return x.shape[1:], y.shape[1:], x.dtype, y.dtype


def _rows(members: Sequence[int]) -> slice | Tensor:
    """Neighbours as a slice, which costs no copy."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first < len(members) else torch.tensor([*members])
