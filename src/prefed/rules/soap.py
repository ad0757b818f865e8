"""SOAP: Adam in the eigenbasis of Shampoo's two factors of each weight matrix."""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from prefed.core.layout import Entry, Layout
from prefed.rules.covariance_matrix import matrices, part
from prefed.rules.fitted import Fitted
from prefed.rules.refreshed import STEPS_LEFT, due
from prefed.rules.rule import RULES, Field, Fraction, State, grow_mass


@dataclass(frozen=True)
class Side:
    """A factor (size, size), and where it lies among all factors, and its basis among all bases."""

    size: int
    start: int

    def inside(self, held: Tensor) -> Tensor:
        return part(held, self.start, (self.size, self.size))


@dataclass(frozen=True)
class Weights:
    """A tensor as a matrix (rows, columns), with a factor for each side that has one."""

    entry: Entry
    rows: int
    columns: int
    left: Side | None
    right: Side | None

    def inside(self, v: Tensor) -> Tensor:
        return part(v, self.entry.offset, (self.rows, self.columns))

    def turn(self, X: Tensor, basis: Tensor, back: bool = False) -> Tensor:
        """Into the basis, or out of it."""
        if self.left is not None:
            Q = self.left.inside(basis)
            X = (Q if back else Q.mT) @ X
        if self.right is not None:
            Q = self.right.inside(basis)
            X = X @ (Q.mT if back else Q)
        return X


@RULES.register("soap")
@dataclass(frozen=True)
class SOAP(Fitted):
    """Vyas et al. 2024: for each weight matrix L = beta2*L + (1 - beta2)*G G^T and R, with G^T G,
    and Adam (m, v) in their eigenvectors: v of the turned gradient, m turned when it is used.
    Convolutions are matrices (out, in * kernel); biases and other vectors are trained by Adam.

    L and R together are the state P. As in the paper, v is not turned when the basis changes, and
    a gradient does not see a basis that it is part of. Its code leaves the first step out, for want
    of a basis; here that is the identity as long as P is zero. Its code follows the eigenvectors by
    power iterations; here they are computed, from the factors of the step before.

    beta1          the decay of m, the moving average of the gradient
    beta2          the decay of v, the moving average of the squares, and of P
    tau            bounds the step where v is small
    refresh        steps between two eigenbases
    largest_side   a longer side has no factor (10000 in SOAP's code)
    """

    elementwise: ClassVar[bool] = False

    beta1: Fraction = 0.95
    beta2: Fraction = 0.95
    tau: PositiveFloat = 1e-8
    refresh: PositiveInt = 10
    largest_side: PositiveInt = 256

    @property
    def counts_all(self) -> bool:
        return False  # matrices go one by one

    def fields(self, layout: Layout) -> dict[str, Field]:
        vector, factors = (layout.size,), (sum(s.size**2 for s in self.fit(layout).sides),)
        mass = Field((1,), nonnegative=True)
        found = {"m": Field(vector), "v": Field(vector, nonnegative=True)}
        found |= {"m_mass": mass, "v_mass": mass}
        if factors[0]:
            basis = Field(factors, cache=True)
            found |= {"P": Field(factors), "basis": basis, "steps_left": STEPS_LEFT}
        return found

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        assert self.layout is not None
        found, at = [], 0
        for entry in self.layout.entries:
            if not (n := math.prod(entry.shape)):
                continue
            rows = entry.shape[0] if entry.shape else 1
            sides: list[Side | None] = []
            for size in (rows, n // rows):
                known = len(entry.shape) > 1 and size <= self.largest_side
                sides.append(Side(size, at) if known else None)
                at += size**2 if known else 0
            found.append(Weights(entry, rows, n // rows, *sides))
        return tuple(found)

    @property
    def sides(self) -> list[Side]:
        return [side for w in self.weights for side in (w.left, w.right) if side is not None]

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if w.dim() == 1:  # one holder is a block of one
            state = {name: value.unsqueeze(0) for name, value in state.items()}
            w, g = w.unsqueeze(0), g.unsqueeze(0)
        m, v = state["m"].lerp_(g, 1 - self.beta1), state["v"]
        m_mass = grow_mass(state["m_mass"], self.beta1).unsqueeze(-1)
        v_mass = grow_mass(state["v_mass"], self.beta2).unsqueeze(-1)
        if self.sides:
            self.follow_basis(state)
        for weights in self.weights:
            G, M = (matrices(rows, weights.entry) for rows in (g, m))
            basis = state.get("basis", g)
            turned, V = weights.turn(G, basis), weights.inside(v)
            V.mul_(self.beta2).addcmul_(turned, turned, value=1 - self.beta2)
            N = weights.turn(M, basis) / m_mass / (V / v_mass).sqrt_().add_(self.tau)
            target = weights.entry.view(w)
            target.sub_(weights.turn(N, basis, back=True).reshape(target.shape), alpha=lr)
            for side, X in ((weights.left, G), (weights.right, G.mT)):
                if side is not None:
                    factor = side.inside(state["P"])
                    factor.baddbmm_(X, X.mT, beta=self.beta2, alpha=1 - self.beta2)

    def follow_basis(self, state: State) -> None:
        if (rows := due(state["steps_left"], self.refresh)) is not None:
            for side in self.sides:
                side.inside(state["basis"])[rows] = eigenvectors(side.inside(state["P"])[rows])


def eigenvectors(P: Tensor) -> Tensor:
    """Of factors (C, n, n), computed in float64; of zero the identity. Factors that are not finite
    are those of weights that are not: the run will tell."""
    alike = len(P) > 1 and bool((P[:1] == P).all())  # as when a round begins
    factors = (P[:1] if alike else P).double()
    factors = factors.where(factors.isfinite().flatten(1).all(1)[:, None, None], 0.0)
    vectors: Tensor
    values, vectors = torch.linalg.eigh(factors)
    size, identity = P.shape[-1], torch.eye(P.shape[-1], dtype=torch.float64, device=P.device)
    rounding = 4 * size * torch.finfo(P.dtype).eps  # of what P was added up in
    missing = (values <= rounding * values[:, -1:]).sum(-1)
    for own, count in zip(vectors, missing.tolist(), strict=True):
        if count == size:
            own.copy_(identity)
        elif count > 1:
            none = own[:, :count]
            towards = _directions(size)[:, :count].to(P.device)
            none.copy_(none @ torch.linalg.qr(none.mT @ towards)[0])
    return vectors.to(P.dtype).expand_as(P)


@cache
def _directions(size: int) -> Tensor:
    """Always the same. The vectors of an eigenvalue that occurs more than once, as zero does before
    there were enough gradients, are any basis of a space; one that is turned towards these is the
    same however the others were computed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, size, dtype=torch.float64, generator=generator)
