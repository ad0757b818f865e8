"""The batches of a block of clients, stacked so that one operation serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.batches import Batches
from prefed.data import FederatedData
from prefed.settings import Settings


@dataclass(frozen=True)
class Group:
    """Clients of a block whose batches have the same shape."""

    rows: slice | Tensor
    """Which rows of the block they are."""
    x: Tensor
    """(n, all samples of the round, ...)"""
    y: Tensor
    batches: list[Batches]
    """Of each client. Empty if every step uses all of x and y."""

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """x and y of step k, (n, batch, ...)."""
        if not self.batches:
            return self.x, self.y
        if self.batches[0].augment is not None:
            pairs = [batches[k] for batches in self.batches]
            return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
        part = self.batches[0].part(k)
        return self.x[:, part], self.y[:, part]


def gather(
    data: FederatedData,
    clients: Sequence[int],
    round: int,
    settings: Settings,
    most: int,
    device: torch.device,
) -> list[Group]:
    """Groups of at most so many clients. With drawn batches all clients are alike; with full
    batches those of one size are grouped, since a loss cannot be told to leave padding out."""
    augment = data.augment
    batches = [Batches(data.client(c), c, round, settings, augment, device) for c in clients]
    whole = settings.batch_size is None and augment is None
    alike: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for row, b in enumerate(batches):
        alike.setdefault((b.x.shape, b.y.shape), []).append(row)
    groups = []
    for members in alike.values():
        for start in range(0, len(members), most):
            part = members[start : start + most]
            x = torch.stack([batches[row].x for row in part])
            y = torch.stack([batches[row].y for row in part])
            groups.append(Group(_rows(part), x, y, [] if whole else [batches[r] for r in part]))
    return groups


def _rows(members: list[int]) -> slice | Tensor:
    """Neighbours as a slice, which costs no copy."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first < len(members) else torch.tensor(members)
