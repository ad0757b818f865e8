"""The batches of a block of clients, stacked so that one operation serves all of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data import FederatedData, Samples
from prefed.data.partition import Partition
from prefed.data.samples import LazySamples
from prefed.training.batches import NO_LIMITS, Batches, sample_numbers_of
from prefed.training.settings import Settings

Part = tuple[slice | Tensor, Inputs, Tensor]
"""Rows of a block, and their x and y (n, batch, ...)."""


class Stack(Protocol):
    """Clients of a block whose batches are stacked together."""

    def batches(self, k: int) -> Iterator[Part]:
        """Those of step k, which some clients may not have any more."""

    def ignores(self, y: Tensor) -> bool:
        """Some of the targets are labels of no class."""


class Alike:
    """Clients of a block whose batches have the same shape."""

    rows: slice | Tensor
    """Which rows of the block they are."""
    x: Inputs
    """(n, all samples of the round, ...)"""
    y: Tensor
    size: int | None
    """Samples in a batch; None if every step uses all of x and y."""

    @cached_property
    def _ignores(self) -> bool:
        return _some_ignored(self.y)

    def ignores(self, y: Tensor) -> bool:
        return self._ignores

    def batch(self, k: int) -> tuple[Inputs, Tensor]:
        """x and y of step k, (n, batch, ...)."""
        if self.size is None:
            return self.x, self.y
        part = slice(k * self.size, (k + 1) * self.size)
        return batch.mapped(lambda leaf: leaf[:, part], self.x), self.y[:, part]

    def batches(self, k: int) -> Iterator[Part]:
        yield self.rows, *self.batch(k)


@dataclass(frozen=True)
class Group(Alike):
    """Their samples, side by side."""

    rows: slice | Tensor
    x: Inputs
    y: Tensor
    size: int | None = None


class ByNumber(Alike):
    """Samples of one data set by their numbers (n, all samples of the round): x is gathered when
    it is first asked for, and not by an engine that can do without."""

    size: int

    def __init__(
        self, rows: slice, whole: Samples, numbers: Tensor, size: int, device: torch.device
    ) -> None:
        self.rows, self.size, self.whole, self.numbers = rows, size, whole, numbers
        self._device = device
        taken = whole.y.index_select(0, numbers.view(-1))
        self.y: Tensor = batch.moved(self._side_by_side(taken), device)

    def _side_by_side(self, leaf: Tensor) -> Tensor:
        found: Tensor = leaf.unflatten(0, self.numbers.shape)
        return found

    @cached_property
    def x(self) -> Inputs:
        taken = batch.take(self.whole.x, self.numbers.view(-1))
        return batch.moved(batch.mapped(self._side_by_side, taken), self._device)


@dataclass(frozen=True)
class Unequal:
    """Clients whose batches differ in number, in size, or in how they are augmented: those of one
    step and size are stacked when it comes. None takes more steps than the one before it."""

    clients: list[Batches]

    def ignores(self, y: Tensor) -> bool:
        return _some_ignored(y)

    def batches(self, k: int) -> Iterator[Part]:
        alike: dict[object, list[tuple[int, Inputs, Tensor]]] = {}
        for row, batches in enumerate(self.clients):
            if k >= len(batches):
                break
            x, y = batches[k]
            alike.setdefault((y.shape, batch.kind(x)), []).append((row, x, y))
        for found in alike.values():
            rows, xs, ys = zip(*found, strict=True)
            yield _rows(rows), batch.stacked(xs), torch.stack(ys)


def gather(
    data: FederatedData,
    clients: Sequence[int],
    round: int,
    settings: Settings,
    most: int,
    device: torch.device,
    limits: Mapping[int, int] = NO_LIMITS,
) -> list[Stack]:
    """Stacks of at most `most` clients, if their batches are alike. A loss cannot be told to leave
    padding out, so full batches are grouped by size. Clients with `limits` stop earlier."""
    size, limited = settings.batch_size, any(client in limits for client in clients)
    differ = data.augment is not None or limited or data.client(clients[0]).is_ragged
    if size is not None and not differ and _are_equal(data, clients, settings):
        return [
            _drawn(data, clients, slice(start, start + most), round, settings, device)
            for start in range(0, len(clients), most)
        ]
    augment = data.augment
    if size is not None or differ:
        batches = [
            Batches(data.client(c), c, round, settings, augment, device, limits.get(c))
            for c in clients
        ]
        return [Unequal(batches)]
    return [*whole_batches(data, clients, most, device)]


def whole_batches(
    data: FederatedData, clients: Sequence[int], most: int, device: torch.device
) -> Iterator[Group]:
    """All samples of each client, in groups of at most `most` clients with equally many, which are
    padded to one width if they are of unequal length."""
    samples = [data.client(client) for client in clients]
    alike: dict[object, list[int]] = {}
    for row, of_one in enumerate(samples):
        widths = [batch.kind(part) for part in of_one.all()] if of_one.is_ragged else []
        alike.setdefault((len(of_one), *widths), []).append(row)
    for members in alike.values():
        for start in range(0, len(members), most):
            part = members[start : start + most]
            xs, ys = zip(*(map(batch.padded, samples[row].all()) for row in part), strict=True)
            x, y = (batch.moved(v, device) for v in (batch.stacked(xs), torch.stack(ys)))
            yield Group(_rows(part), x, y)


def _are_equal(data: FederatedData, clients: Sequence[int], settings: Settings) -> bool:
    """All clients take equally many steps, in whole batches."""
    if settings.local_epochs is None:
        return True
    sizes = {data.size(client) for client in clients}
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
) -> Alike:
    """All batches of a group at once."""
    clients, size = clients[rows], settings.batch_size
    assert size is not None
    partition = data.clients if isinstance(data.clients, Partition) else None
    if partition is not None and not isinstance(partition.whole, LazySamples):
        starts, sizes = partition.places(clients)
        numbers = sample_numbers_of(settings, round, clients, sizes.tolist())
        numbers += starts[:, None]
        of_whole = partition.order[torch.from_numpy(numbers)]
        return ByNumber(rows, partition.whole, of_whole, size, device)
    samples = [data.client(c) for c in clients]
    drawn = torch.from_numpy(sample_numbers_of(settings, round, clients, [*map(len, samples)]))
    first = samples[0]
    if partition is not None:  # one reading for all
        named = torch.cat([s.numbers(of_one) for s, of_one in zip(samples, drawn, strict=True)])
        x, y = first.part(named).take(torch.arange(len(named)))  # each sample once
        x, y = (batch.mapped(lambda v: v.unflatten(0, drawn.shape), leaf) for leaf in (x, y))
        return Group(rows, batch.moved(x, device), batch.moved(y, device), size)
    if any(isinstance(s, LazySamples) for s in samples):  # read what was drawn, and no more
        samples = [Samples(*s.take(i)) for s, i in zip(samples, drawn, strict=True)]
        first, drawn = samples[0], torch.arange(drawn.shape[1]).expand(drawn.shape)
    for client, s in zip(clients, samples, strict=True):
        if s.kind != first.kind:
            raise PrefedError(
                f"clients[{client}]: its samples are not of the shape and type of those of "
                f"clients[{clients[0]}]"
            )
    index = [s.numbers(of_one) for s, of_one in zip(samples, drawn, strict=True)]
    x = batch.mapped(partial(_side_by_side, index), *(s.x for s in samples))
    y = _side_by_side(index, *(s.y for s in samples))
    return Group(rows, batch.moved(x, device), batch.moved(y, device), size)


def _side_by_side(index: list[Tensor], *arrays: Tensor) -> Tensor:
    """The rows that are named of each, (n, rows, ...)."""
    found = arrays[0].new_empty((len(index), len(index[0]), *arrays[0].shape[1:]))
    for values, rows, into in zip(arrays, index, found, strict=True):
        torch.index_select(values, 0, rows, out=into)
    return found


def _rows(members: Sequence[int]) -> slice | Tensor:
    """Neighbours as a slice, which costs no copy."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first < len(members) else torch.tensor([*members])
