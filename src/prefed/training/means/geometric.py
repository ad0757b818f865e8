from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from prefed.training.means.mean_rule import MEANS, MeanRule
from prefed.training.means.middle import Median, median

NEAREST = 1e-12
"""Times the median distance: a client that is no farther away is where z is."""


@MEANS.register("geometric")
@dataclass(frozen=True)
class Geometric(MeanRule):
    """The vector whose distances to those of the clients have the least weighted sum (Pillutla et
    al. 2022), by Weiszfeld's steps from the median of each coordinate:

        z = sum(b*x) / sum(b),  b = weight / |x - z|

    A client that z has come to is left out of the sums, and holds it back by its weight (Vardi and
    Zhang 2000).

    iterations   steps at most
    tolerance    it ends with a step shorter than this times the clients' median distance
    """

    iterations: PositiveInt = 50
    tolerance: Annotated[float, Field(ge=0)] = 1e-6

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        z = Median().mean(rows, weights).to(torch.float64)
        own = torch.tensor(weights, dtype=torch.float64)
        for _ in range(self.iterations):
            distances = torch.stack([torch.linalg.vector_norm(row - z) for row in rows]).cpu()
            typical = median(distances, weights)
            here = distances <= NEAREST * typical
            shares = torch.where(here, 0, own / distances)
            if not (pull := float(shares.sum())):  # all are here
                break
            target = torch.zeros_like(z)
            for row, share in zip(rows, shares.tolist(), strict=True):
                target.add_(row, alpha=share / pull)
            target.sub_(z)
            away = float(torch.linalg.vector_norm(target))
            held = min(1.0, float(own[here].sum()) / (pull * away)) if away else 1.0
            z.add_(target, alpha=1 - held)
            if away * (1 - held) <= self.tolerance * typical:
                break
        return z.to(rows[0].dtype)
