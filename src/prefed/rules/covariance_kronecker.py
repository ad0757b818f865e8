"""The covariance rule with two small factors for each weight matrix."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from prefed.core.layout import Entry
from prefed.rules.covariance import SHAPES
from prefed.rules.covariance_matrix import MatrixCovariance, eigen, matrices, part


@dataclass(frozen=True)
class Side:
    """One factor of a weight matrix, and where it lies in P and its eigenvectors in the root."""

    size: int
    whole: bool
    """The matrix; otherwise its diagonal."""
    start: int
    root_start: int

    @property
    def numbers(self) -> int:
        return self.size**2 if self.whole else self.size

    def inside(self, P: Tensor) -> Tensor:
        """(C, size, size) or (C, size)"""
        shape = (self.size, self.size) if self.whole else (self.size,)
        return part(P, self.start, shape)

    def vectors(self, root: Tensor) -> Tensor | None:
        """The eigenvectors (C, size, size) of a whole factor."""
        return part(root, self.root_start, (self.size, self.size)) if self.whole else None


@dataclass(frozen=True)
class Weights:
    """A weight matrix (rows, columns) with its two sides; a vector (a bias) has columns = 1 and
    no second side."""

    entry: Entry
    rows: int
    columns: int
    left: Side
    right: Side | None
    root_start: int

    def divisors(self, root: Tensor) -> Tensor:
        """(C, rows, columns): 1 / (root of the eigenvalue + tau)."""
        return part(root, self.root_start, (self.rows, self.columns))


@dataclass(frozen=True)
class Small:
    """Where the numbers of all vectors lie in the weights, in P and in the root."""

    weights: Tensor
    P: Tensor
    root: Tensor

    def on(self, device: torch.device) -> "Small":
        if self.P.device == device:
            return self
        return Small(self.weights.to(device), self.P.to(device), self.root.to(device))


@SHAPES.register("kronecker")
@dataclass(frozen=True)
class KroneckerCovariance(MatrixCovariance):
    """For each weight matrix, with R the residual g - m in its shape (out, in):

        A = mean of R R^T,   B = mean of R^T R,   P = A (x) B / tr(A),

    which is the covariance itself if it is a Kronecker product. A and B are what is shared; the
    step is (P^(1/2) + tau*I)^(-1) m, taken in the eigenvectors of A and B. Convolutions are
    reshaped to (out, in * kernel); biases and other vectors are diagonal, and so is the factor
    of a side longer than `largest_side`: multiplying with a larger one would cost more than the
    gradient of a small network does.
    """

    largest_side: int = 256

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        assert self.layout is not None
        found: list[Weights] = []
        at = root_at = 0
        for entry in self.layout.entries:
            n = prod(entry.shape)
            matrix = len(entry.shape) > 1
            rows = entry.shape[0] if matrix else n
            if not n:
                continue
            start, root_at = root_at, root_at + n
            sides = []
            for size in (rows, n // rows) if matrix else (n,):
                side = Side(size, matrix and size <= self.largest_side, at, root_at)
                at, root_at = at + side.numbers, root_at + side.whole * size**2
                sides.append(side)
            right = sides[1] if matrix else None
            found.append(Weights(entry, rows, n // rows, sides[0], right, start))
        return tuple(found)

    def kept_shape(self) -> tuple[int, ...]:
        return (sum(w.left.numbers + (w.right.numbers if w.right else 0) for w in self.weights),)

    def root_shape(self) -> tuple[int, ...]:
        sides = [side for w in self.weights for side in (w.left, w.right) if side and side.whole]
        return (sum(w.rows * w.columns for w in self.weights) + sum(s.size**2 for s in sides),)

    @cached_property
    def small(self) -> Small:
        """All vectors at once: steps on each would cost more in calls than in numbers."""
        vectors = [w for w in self.weights if w.right is None]

        def numbers(starts: list[int]) -> Tensor:
            ranges = (torch.arange(v.rows) + at for v, at in zip(vectors, starts, strict=True))
            return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])

        return Small(
            numbers([v.entry.offset for v in vectors]),
            numbers([v.left.start for v in vectors]),
            numbers([v.root_start for v in vectors]),
        )

    def add_outer(self, P: Tensor, r: Tensor, keep: float, take: float) -> None:
        for weights in self.weights:
            if weights.right is not None:
                R = matrices(r, weights.entry)
                _add(weights.left, P, R, keep, take)
                _add(weights.right, P, R.mT, keep, take)
        small = self.small.on(P.device)
        squares = r[:, small.weights].square_().mul_(take)
        P[:, small.P] = squares.add_(P[:, small.P], alpha=keep)

    def mean_variance(self, P: Tensor) -> Tensor:
        """The trace of A (x) B / tr(A) is that of B."""
        sides = (weights.right or weights.left for weights in self.weights)
        traces = [_diagonal(side, P).sum(-1) for side in sides]
        return torch.stack(traces).sum(0).div_(sum(w.rows * w.columns for w in self.weights))

    def derive(self, P: Tensor) -> Tensor:
        tau = self.tau_for(P)
        tau = tau.unsqueeze(-1) if isinstance(tau, Tensor) else tau
        root = P.new_empty(len(P), *self.root_shape())
        for weights in self.weights:
            a = _eigenvalues(weights.left, P, root)
            spectrum = a.unsqueeze(-1)
            if weights.right is not None:
                trace = a.sum(-1, keepdim=True).clamp_(min=torch.finfo(a.dtype).tiny)
                b = _eigenvalues(weights.right, P, root)
                spectrum = (a / trace).unsqueeze(-1) * b.unsqueeze(-2)
            weights.divisors(root).copy_(spectrum.sqrt().add_(tau).reciprocal_())
        return root

    def move(self, w: Tensor, root: Tensor, u: Tensor, lr: float) -> None:
        for weights in self.weights:
            if weights.right is None:
                continue
            target, X = weights.entry.view(w), matrices(u, weights.entry)
            U, V = weights.left.vectors(root), weights.right.vectors(root)
            X = torch.bmm(U.mT, X) if U is not None else X
            X = torch.bmm(X, V) if V is not None else X
            X = X * weights.divisors(root)
            X = torch.bmm(U, X) if U is not None else X
            X = torch.bmm(X, V.mT) if V is not None else X
            target.sub_(X.view(target.shape), alpha=lr)
        small = self.small.on(w.device)
        w.index_add_(1, small.weights, u[:, small.weights].mul_(root[:, small.root]), alpha=-lr)

    def diagonal(self, P: Tensor) -> Tensor:
        parts = []
        for weights in self.weights:
            a = _diagonal(weights.left, P[None])[0]
            if weights.right is not None:
                tiny = torch.finfo(P.dtype).tiny
                b = _diagonal(weights.right, P[None])[0]
                a = torch.outer(a / a.sum().clamp(min=tiny), b)
            parts.append(a.flatten())
        return torch.cat(parts)


def _add(side: Side, P: Tensor, R: Tensor, keep: float, take: float) -> None:
    """factor = keep*factor + take * R R^T, or the diagonal of that."""
    factor = side.inside(P)
    if side.whole:
        factor.baddbmm_(R, R.mT, beta=keep, alpha=take)
    else:
        factor.mul_(keep).add_(R.square().sum(-1), alpha=take)


def _eigenvalues(side: Side, P: Tensor, root: Tensor) -> Tensor:
    """The eigenvalues of a factor (C, size) in float64; its eigenvectors go into the root."""
    factor = side.inside(P)
    if (vectors := side.vectors(root)) is None:
        return factor.double()
    values, V = eigen(factor)
    vectors.copy_(V)
    return values


def _diagonal(side: Side, P: Tensor) -> Tensor:
    """(C, size)"""
    factor = side.inside(P)
    return factor.diagonal(dim1=-2, dim2=-1) if side.whole else factor
