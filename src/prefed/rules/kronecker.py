"""The covariance rule with two small factors for each weight matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from prefed.layout import Entry
from prefed.rules.covariance import SHAPES
from prefed.rules.matrix import MatrixCovariance, eigen, matrices, view

LARGEST = 1024
"""The factor of a longer side (of an embedding, say) is its diagonal only."""


@dataclass(frozen=True)
class Side:
    """One factor of a weight matrix, and where it lies in P and in the root."""

    size: int
    whole: bool
    """The matrix; otherwise its diagonal."""
    start: int
    root_start: int

    @property
    def numbers(self) -> int:
        return self.size**2 if self.whole else self.size

    @property
    def root_numbers(self) -> int:
        """Eigenvalues, and the eigenvectors of a whole factor."""
        return self.size + self.size**2 if self.whole else self.size

    def inside(self, P: Tensor) -> Tensor:
        """(C, size, size) or (C, size)"""
        part = P[:, self.start : self.start + self.numbers]
        return part.unflatten(1, (self.size, self.size)) if self.whole else part

    def eigen(self, root: Tensor) -> tuple[Tensor, Tensor | None]:
        """Eigenvalues (C, size), and eigenvectors (C, size, size) of a whole factor."""
        part = root[:, self.root_start : self.root_start + self.root_numbers]
        V = part[:, self.size :].unflatten(1, (self.size, self.size)) if self.whole else None
        return part[:, : self.size], V


@dataclass(frozen=True)
class Weights:
    """A weight matrix with its two sides, or a vector (a bias) with one and no second."""

    entry: Entry
    left: Side
    right: Side | None


@SHAPES.register("kronecker")
@dataclass(frozen=True)
class KroneckerCovariance(MatrixCovariance):
    """For each weight matrix, with R the residual g - m in its shape (out, in):

        A = mean of R R^T,   B = mean of R^T R,   P = A (x) B / tr(A),

    which is the covariance itself if it is a Kronecker product. A and B are what is shared; the
    step is (P^(1/2) + tau*I)^(-1) m, taken in the eigenvectors of A and B. Convolutions are
    reshaped to (out, in * kernel); biases and other vectors are diagonal.
    """

    def weights(self) -> Iterator[Weights]:
        assert self.layout is not None
        at = root_at = 0
        for entry in self.layout.entries:
            if not prod(entry.shape):
                continue
            sizes = [prod(entry.shape)]
            if len(entry.shape) > 1:
                sizes = [entry.shape[0], prod(entry.shape[1:])]
            sides = []
            for size in sizes:
                side = Side(size, len(sizes) > 1 and size <= LARGEST, at, root_at)
                at, root_at = at + side.numbers, root_at + side.root_numbers
                sides.append(side)
            yield Weights(entry, sides[0], sides[1] if len(sides) > 1 else None)

    def sides(self) -> Iterator[Side]:
        for weights in self.weights():
            yield weights.left
            if weights.right is not None:
                yield weights.right

    def kept_shape(self) -> tuple[int, ...]:
        return (sum(side.numbers for side in self.sides()),)

    def root_shape(self) -> tuple[int, ...]:
        return (sum(side.root_numbers for side in self.sides()),)

    def add_outer(self, P: Tensor, r: Tensor, keep: float, take: float) -> None:
        for weights in self.weights():
            R = matrices(r, weights.entry)
            _add(weights.left, P, R, keep, take)
            if weights.right is not None:
                _add(weights.right, P, R.mT, keep, take)

    def derive(self, P: Tensor) -> Tensor:
        parts = []
        for side in self.sides():
            factor = side.inside(P)
            if side.whole:
                values, V = eigen(factor)
                parts += [values.to(P.dtype), V.flatten(1).to(P.dtype)]
            else:
                parts.append(factor)
        return torch.cat(parts, dim=1)

    def move(self, w: Tensor, root: Tensor, u: Tensor, lr: float) -> None:
        for weights in self.weights():
            target, X = view(w, weights.entry), matrices(u, weights.entry)
            a, U = weights.left.eigen(root)
            if weights.right is None:
                X = X / (a.sqrt() + self.tau).unsqueeze(-1)
            else:
                b, V = weights.right.eigen(root)
                trace = a.sum(-1, keepdim=True).clamp_(min=torch.finfo(a.dtype).tiny)
                scale = (a / trace).sqrt().unsqueeze(-1) * b.sqrt().unsqueeze(-2)
                X = U.mT @ X if U is not None else X
                X = X @ V if V is not None else X
                X = X / scale.add_(self.tau)
                X = U @ X if U is not None else X
                X = X @ V.mT if V is not None else X
            target.sub_(X.reshape(target.shape), alpha=lr)

    def diagonal(self, P: Tensor) -> Tensor:
        parts = []
        for weights in self.weights():
            a = _diagonal(weights.left, P)
            if weights.right is not None:
                tiny = torch.finfo(P.dtype).tiny
                a = torch.outer(a / a.sum().clamp(min=tiny), _diagonal(weights.right, P))
            parts.append(a.flatten())
        return torch.cat(parts)


def _add(side: Side, P: Tensor, R: Tensor, keep: float, take: float) -> None:
    """factor = keep*factor + take * R R^T, or the diagonal of that."""
    factor = side.inside(P)
    if side.whole:
        factor.baddbmm_(R, R.mT, beta=keep, alpha=take)
    else:
        factor.mul_(keep).add_(R.square().sum(-1), alpha=take)


def _diagonal(side: Side, P: Tensor) -> Tensor:
    factor = side.inside(P[None])[0]
    return factor.diagonal() if side.whole else factor
