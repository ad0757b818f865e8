"""The batches of a block of clients, stacked so that one operation serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.data import FederatedData
from prefed.engines.sequential import Batches
from prefed.settings import Settings


@dataclass(frozen=True)
class Group:
    """Clients of a block whose batches have the same shape."""

    rows: slice | Tensor
    """Which rows of the block they are."""
    x: Tensor
    """(n, all samples of the round, ...)"""
    y: Tensor
    batch_size: int | None

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """x and y of step k, (n, batch, ...)."""
        if self.batch_size is None:
            return self.x, self.y
        part = slice(k * self.batch_size, (k + 1) * self.batch_size)
        return self.x[:, part], self.y[:, part]


def gather(
    data: FederatedData, clients: Sequence[int], round: int, settings: Settings, most: int
) -> list[Group]:
    """Groups of at most so many clients. With drawn batches all clients are alike; with full
    batches those of one size are grouped, since a loss cannot be told to leave padding out."""
    batches = [Batches(data.client(c), c, round, settings) for c in clients]
    alike: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for row, b in enumerate(batches):
        alike.setdefault((b.x.shape, b.y.shape), []).append(row)
    groups = []
    for members in alike.values():
        for start in range(0, len(members), most):
            part = members[start : start + most]
            x = torch.stack([batches[row].x for row in part])
            y = torch.stack([batches[row].y for row in part])
            groups.append(Group(_rows(part), x, y, settings.batch_size))
    return groups


def _rows(members: list[int]) -> slice | Tensor:
    """Neighbours as a slice, which costs no copy."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first < len(members) else torch.tensor(members)
