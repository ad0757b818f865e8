"""Clients that have many others near them: Krum and multi-Krum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from prefed.training.means.mean_rule import (
    MEANS,
    MeanRule,
    Share,
    lying,
    pieces,
    weighted_mean,
)


@dataclass(frozen=True)
class Nearest(MeanRule):
    """Blanchard et al. 2017: with n clients of which f may lie, the score of a client is the sum of
    its squared distances to the n - f - 2 that are nearest to it. Low is good."""

    share: Share = 0.2

    def least(self, clients: int) -> int:
        return 2 * lying(self.share, clients) + 3

    def best(self, rows: Sequence[Tensor]) -> list[int]:
        """The clients from the best score to the worst; of equal ones the first."""
        found: list[int] = self.scores(rows).argsort(stable=True).tolist()
        return found

    def scores(self, rows: Sequence[Tensor]) -> Tensor:
        count = len(rows)
        near = max(1, count - self.liars(count) - 2)
        # The first of each row is the client itself.
        return squared_distances(rows).sort(1).values[:, 1 : 1 + near].sum(1)

    def liars(self, clients: int) -> int:
        """f: never more than the rule can bear, where fewer clients came than were asked."""
        return min(lying(self.share, clients), max(0, (clients - 3) // 2))


@MEANS.register("krum")
@dataclass(frozen=True)
class Krum(Nearest):
    """Blanchard et al. 2017: the vector of the one client that is nearest to its neighbours.

    share   of the clients that may lie: n clients bear f with 2*f + 3 <= n
    """

    weighted: ClassVar[bool] = False

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return rows[self.best(rows)[0]].clone()


@MEANS.register("multi-krum")
@dataclass(frozen=True)
class MultiKrum(Nearest):
    """Blanchard et al. 2017: the weighted mean of the clients with the best scores of Krum. The
    scores do not know the weights.

    share   of the clients that may lie: n clients bear f with 2*f + 3 <= n
    keep    how many clients are in the mean; None is n - f
    """

    keep: PositiveInt | None = None

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        keep = min(self.keep or len(rows) - self.liars(len(rows)), len(rows))
        chosen = sorted(self.best(rows)[:keep])
        return weighted_mean([rows[i] for i in chosen], [weights[i] for i in chosen])


def squared_distances(rows: Sequence[Tensor]) -> Tensor:
    """Between all pairs (C, C), in float64: from |a|^2 + |b|^2 - 2ab."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    for _, block in pieces(rows):
        block = block.to(torch.float64)
        products.addmm_(block, block.T)
    squares = products.diagonal()
    found = (squares[:, None] + squares[None, :] - 2 * products).clamp_(min=0)
    found = found.nan_to_num_(nan=torch.inf)  # two that are beyond all numbers
    return found.fill_diagonal_(-1)  # each is nearest to itself
