from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.training.means.mean_rule import MEANS, MeanRule, weighted_mean
from prefed.training.means.middle import median


@MEANS.register("clipped")
@dataclass(frozen=True)
class Clipped(MeanRule):
    """The weighted mean, for which vectors longer than the clients' median length are shortened to
    it: a liar counts for no more than an honest client."""

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        norms = torch.stack([torch.linalg.vector_norm(r, dtype=torch.float64) for r in rows])
        most = median(norms, weights)
        factors = [min(1.0, most / norm) if norm else 1.0 for norm in norms.tolist()]
        shortened = [w * factor for w, factor in zip(weights, factors, strict=True)]
        return weighted_mean(rows, shortened, sum(weights))
