"""What lies in the middle, coordinate by coordinate: the median, and the mean without both ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from prefed.training.means.mean_rule import MEANS, MeanRule, Share, lying, pieces

SORTED_BY_NUMPY = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ByCoordinate(MeanRule):
    by_coordinate: ClassVar[bool] = True

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        found = torch.empty_like(rows[0])
        for part, block in pieces(rows):
            found[part] = self.middle(block, weights)
        return found

    def middle(self, block: Tensor, weights: Sequence[float]) -> Tensor:
        """(C, n) -> (n)"""
        raise NotImplementedError


@MEANS.register("median")
@dataclass(frozen=True)
class Median(ByCoordinate):
    """Yin et al. 2018: of each coordinate the median; of an even number the mean of the two in the
    middle. With weights, half of the weight lies on either side."""

    def middle(self, block: Tensor, weights: Sequence[float]) -> Tensor:
        count = len(weights)
        if is_uniform(weights):
            rest = (count - 1) // 2
            return mean_of(in_order(block)[rest : count - rest])
        return without_ends(block, weights, 0.5, strict=True)


@MEANS.register("trimmed")
@dataclass(frozen=True)
class Trimmed(ByCoordinate):
    """Yin et al. 2018: of each coordinate the mean without the largest and the smallest values.

    share   left out at either end: as many clients as have at most this share of the weight
    """

    share: Share = 0.2

    def middle(self, block: Tensor, weights: Sequence[float]) -> Tensor:
        count = len(weights)
        if is_uniform(weights):
            cut = min(lying(self.share, count), (count - 1) // 2)
            return mean_of(in_order(block)[cut : count - cut])
        return without_ends(block, weights, self.share, strict=False)


def median(numbers: Tensor, weights: Sequence[float]) -> float:
    """Of one number for each client (C)."""
    return float(Median().middle(numbers.unsqueeze(1), weights))


def is_uniform(weights: Sequence[float]) -> bool:
    return all(weight == weights[0] for weight in weights)


def in_order(block: Tensor) -> Tensor:
    """Each coordinate's values from small to large. NumPy sorts short columns ten times as fast."""
    if block.device.type == "cpu" and block.dtype in SORTED_BY_NUMPY:
        return torch.from_numpy(np.sort(block.numpy(), axis=0))
    return block.sort(0).values


def mean_of(rows: Tensor) -> Tensor:
    """Added up in the order of the rows."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total.div_(len(rows))


def without_ends(block: Tensor, weights: Sequence[float], share: float, strict: bool) -> Tensor:
    """The weighted mean of what is left when at either end the values go whose weight together is
    at most (if `strict`, less than) this share of the whole."""
    values, order = block.sort(dim=0, stable=True)
    each = torch.tensor(weights, dtype=torch.float64, device=block.device)[order]
    up_to = each.cumsum(0)
    whole = float(sum(weights))
    cut, less = share * whole, torch.lt if strict else torch.le
    if not strict:
        cut *= 1 + 1e-9
    ends = less(up_to, cut) | less(whole - up_to + each, cut)
    each = each.masked_fill_(ends, 0)
    # A value that is left out may be so large that nothing of it must be left: not even 0 times it.
    kept = values.masked_fill_(ends, 0).to(torch.float64).mul_(each)
    return (mean_of(kept) / mean_of(each)).to(block.dtype)
