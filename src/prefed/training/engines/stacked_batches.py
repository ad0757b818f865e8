"""The batches of a block of clients, stacked so that one operation serves all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data import FederatedData, Samples
from prefed.data.samples import LazySamples
from prefed.training.batches import Batches, sample_numbers
from prefed.training.settings import Settings


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
    batches: list[Batches] = field(default_factory=list)
    """Of each client, if they are augmented: each in its own way."""

    @cached_property
    def ignores(self) -> bool:
        """Some of the targets are labels of no class."""
        return are_labels(self.y) and bool((self.y < 0).any())

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """x and y of step k, (n, batch, ...)."""
        if self.batches:
            pairs = [batches[k] for batches in self.batches]
            return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
        if self.size is None:
            return self.x, self.y
        part = slice(k * self.size, (k + 1) * self.size)
        return self.x[:, part], self.y[:, part]


def gather(
    data: FederatedData,
    clients: Sequence[int],
    round: int,
    settings: Settings,
    most: int,
    device: torch.device,
) -> list[Group]:
    """Groups of at most `most` clients. With drawn batches all clients are alike; with full
    batches those of one size are grouped, since a loss cannot be told to leave padding out."""
    if settings.batch_size is not None and data.augment is None:
        return [
            _drawn(data, clients, slice(start, start + most), round, settings, device)
            for start in range(0, len(clients), most)
        ]
    augment = data.augment
    batches = [Batches(data.client(c), c, round, settings, augment, device) for c in clients]
    alike: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for row, b in enumerate(batches):
        alike.setdefault((b.x.shape, b.y.shape), []).append(row)
    groups = []
    for members in alike.values():
        for start in range(0, len(members), most):
            part = members[start : start + most]
            x = torch.stack([batches[row].x for row in part])
            y = torch.stack([batches[row].y for row in part])
            own = [batches[r] for r in part] if augment else []
            groups.append(Group(_rows(part), x, y, settings.batch_size, own))
    return groups


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
    drawn = sample_numbers(settings, round, clients, sizes)
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


def _rows(members: list[int]) -> slice | Tensor:
    """Neighbours as a slice, which costs no copy."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first < len(members) else torch.tensor(members)
