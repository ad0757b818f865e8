from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from prefed.training.means.mean_rule import MEANS, MeanRule
from prefed.training.means.middle import Median, median

NEAREST = 1e-9
"""Times the median distance: the least that a weight is divided by."""


@MEANS.register("geometric")
@dataclass(frozen=True)
class Geometric(MeanRule):
    """The vector whose distances to those of the clients have the least weighted sum (Pillutla et
    al. 2022), by Weiszfeld's steps from the median of each coordinate:

        z = sum(b*x) / sum(b),  b = weight / |x - z|

    iterations   steps at most
    tolerance    it ends with a step shorter than this times the clients' median distance
    """

    iterations: PositiveInt = 50
    tolerance: Annotated[float, Field(ge=0)] = 1e-6

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        z = Median().mean(rows, weights).to(torch.float64)
        for _ in range(self.iterations):
            distances = torch.stack([torch.linalg.vector_norm(row - z) for row in rows])
            typical = median(distances, weights)
            tiny = torch.finfo(torch.float64).tiny
            least = max(NEAREST * typical, tiny)
            shares = torch.tensor(weights, dtype=torch.float64) / distances.cpu().clamp(min=least)
            shares = shares / shares.sum()
            before, z = z, torch.zeros_like(z)
            for row, share in zip(rows, shares.tolist(), strict=True):
                z.add_(row, alpha=share)
            if float(torch.linalg.vector_norm(z - before)) <= self.tolerance * typical:
                break
        return z.to(rows[0].dtype)
