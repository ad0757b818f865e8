"""What a mean over clients is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import pydantic
import torch
from torch import Tensor

from prefed.core.registry import Registry

MEANS: "Registry[type[MeanRule]]" = Registry("mean", "prefed.training.means")

Share = Annotated[float, pydantic.Field(ge=0, lt=0.5)]
"""The share of clients that may lie."""

PIECE = 1 << 20
"""Numbers of all clients together that are worked on at a time."""


@dataclass(frozen=True)
class MeanRule(ABC):
    """From what each client sent, one vector for all of them.

    A rule is a value without state. `rows` has a vector (d) for each client, all finite, and
    `weights` a positive number for each. The rows are not changed. What a rule needs besides them
    is a few vectors, or pieces of PIECE numbers, never a second copy of the rows.
    """

    weighted: ClassVar[bool] = True
    """Clients may have unequal weights."""
    by_coordinate: ClassVar[bool] = False
    """Each number is worked out by itself, so that a matrix of the clients' numbers is none of
    their matrices, nor a mean of some: it need not be positive semi-definite."""
    is_plain: ClassVar[bool] = False
    """The weighted mean of all, which needs no rows to be held."""

    @abstractmethod
    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor: ...

    def in_buckets(self, size: int) -> Self:
        """The same rule for means of `size` clients each: one liar spoils a whole bucket."""
        share = getattr(self, "share", None)
        return self if share is None else replace(self, share=size * share)  # type: ignore[call-arg]

    def least(self, clients: int) -> int:
        """How many rows it needs to keep its promise, of so many."""
        return 1


@MEANS.register("plain")
@dataclass(frozen=True)
class Plain(MeanRule):
    """The weighted mean, added up as updates arrive. A single liar can move it anywhere."""

    is_plain: ClassVar[bool] = True

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return weighted_mean(rows, weights)


def weighted_mean(
    rows: Sequence[Tensor], weights: Sequence[float], whole: float | None = None
) -> Tensor:
    """In the order of the rows, so with the same bits whoever computes it. `whole` is what the sum
    is divided by, if not by the sum of the weights."""
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(row, alpha=weight)
    return total.div_(sum(weights) if whole is None else whole)


def pieces(rows: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """The rows stacked (C, n), a part of the coordinates at a time, and which they are."""
    size, each = len(rows[0]), max(1, PIECE // len(rows))
    for start in range(0, size, each):
        part = slice(start, min(start + each, size))
        yield part, torch.stack([row[part] for row in rows])


def lying(share: float, clients: int) -> int:
    """The number of clients that a share of them is, at most."""
    return int(share * clients + 1e-9)
