"""Muon: momentum whose singular values are all brought near one, for weight matrices."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.layout import Entry, Layout
from prefed.core.patterns import Patterns
from prefed.rules.covariance_matrix import matrices, part
from prefed.rules.fitted import Fitted
from prefed.rules.rule import RULES, Field, Fraction, State, accumulate, grow_mass

EMBEDDINGS = ("*embed*", "*position*", "*wte*", "*wpe*")
"""Patterns of names of embeddings, whose rows are vectors of their own and no matrix together."""
WIDE = 3
"""So many times as wide as high: such a matrix is large beside its square."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: after five iterations singular values lie between about 0.7 and 1.2."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix (rows, columns), and where its momentum begins."""

    entry: Entry
    rows: int
    columns: int
    start: int

    @property
    def scale(self) -> float:
        return math.sqrt(max(1.0, self.rows / self.columns))

    def inside(self, momentum: Tensor) -> Tensor:
        return part(momentum, self.start, (self.rows, self.columns))


@RULES.register("muon")
@dataclass(frozen=True)
class Muon(Fitted):
    """Jordan et al. 2024: momentum = beta*momentum + (1 - beta)*g, and for each weight matrix
    w -= lr * sqrt(max(1, rows/columns)) * orthogonal(momentum), by Newton-Schulz iterations.
    Convolutions are matrices (out, in * kernel). All that is no matrix, and what `adam` names, is
    trained by Adam.

    Jordan's code iterates in bfloat16, and decides for each parameter by hand; here the numbers
    are those of the weights, and the last layer is a matrix like others.

    beta         the decay of the momentum
    nesterov     what is made orthogonal is (1 - beta)*g + beta*momentum
    iterations   of Newton and Schulz
    adam         patterns of names: parameters that Adam trains though they are matrices
    adam_lr      the step size of Adam, as a share of that of the matrices
    beta1        of Adam: the decay of m, the moving average of the gradient
    beta2        of Adam: the decay of v, the moving average of the squares
    tau          of Adam: bounds the step where v is small
    """

    elementwise: ClassVar[bool] = False

    beta: Fraction = 0.95
    nesterov: bool = True
    iterations: NonNegativeInt = 5
    adam: Patterns = EMBEDDINGS
    adam_lr: PositiveFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    tau: PositiveFloat = 1e-10

    @property
    def counts_all(self) -> bool:
        return False  # matrices go one by one

    def fields(self, layout: Layout) -> dict[str, Field]:
        fitted = self.fit(layout)
        if not fitted.weights:
            raise PrefedError("muon: the model has no matrix for it; train it by adam")
        rest = (sum(place.stop - place.start for place in fitted.rest),)
        mass = Field((1,), nonnegative=True)
        found = {"momentum": Field((sum(m.rows * m.columns for m in fitted.weights),))}
        if rest[0]:
            found |= {"m": Field(rest), "v": Field(rest, nonnegative=True)}
            found |= {"m_mass": mass, "v_mass": mass}
        return found

    def patterns(self) -> dict[str, tuple[str, ...]]:
        return {"adam": tuple(pattern for pattern in self.adam if pattern not in EMBEDDINGS)}

    @cached_property
    def weights(self) -> tuple[Matrix, ...]:
        assert self.layout is not None
        found, at = [], 0
        for entry in self.layout.entries:
            n = math.prod(entry.shape)
            if n and self.is_matrix(entry):
                found.append(Matrix(entry, entry.shape[0], n // entry.shape[0], at))
                at += n
        return tuple(found)

    def is_matrix(self, entry: Entry) -> bool:
        return len(entry.shape) > 1 and not any(fnmatchcase(entry.name, p) for p in self.adam)

    @cached_property
    def rest(self) -> tuple[slice, ...]:
        """The places in the weights of all that is no matrix."""
        assert self.layout is not None
        others = [entry for entry in self.layout.entries if not self.is_matrix(entry)]
        return tuple(slice(e.offset, e.offset + math.prod(e.shape)) for e in others)

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if w.dim() == 1:  # one holder is a block of one
            state = {name: value.unsqueeze(0) for name, value in state.items()}
            w, g = w.unsqueeze(0), g.unsqueeze(0)
        for matrix in self.weights:
            M = self.momentum(matrix, matrices(g, matrix.entry), state)
            u, target = orthogonal(M, self.iterations), matrix.entry.view(w)
            target.sub_(u.reshape(target.shape), alpha=lr * matrix.scale)
        if self.rest:
            u = self.by_adam(torch.cat([g[:, place] for place in self.rest], dim=1), state)
            sizes = [place.stop - place.start for place in self.rest]
            for place, part_of in zip(self.rest, u.split(sizes, dim=1), strict=True):
                w[:, place].sub_(part_of, alpha=lr * self.adam_lr)

    def momentum(self, matrix: Matrix, g: Tensor, state: State) -> Tensor:
        """What is made orthogonal (C, rows, columns), after the gradient of that matrix."""
        momentum = matrix.inside(state["momentum"]).lerp_(g, 1 - self.beta)
        return g.lerp(momentum, self.beta) if self.nesterov else momentum

    def by_adam(self, g: Tensor, state: State) -> Tensor:
        m, v = state["m"], state["v"]
        m.lerp_(g, 1 - self.beta1)
        accumulate(v, g, self.beta2, "ema")
        v = v / grow_mass(state["v_mass"], self.beta2)
        return (m / grow_mass(state["m_mass"], self.beta1)).div_(v.sqrt_().add_(self.tau))


def orthogonal(M: Tensor, iterations: int) -> Tensor:
    """About U V^T of M = U S V^T, for each of (C, rows, columns). Without an iteration: M over its
    norm."""
    tall = M.shape[-2] > M.shape[-1]
    X: Tensor = M.mT if tall else M
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + 1e-7)  # all below one
    X = (
        _by_squares(X, iterations)
        if X.shape[-1] >= WIDE * X.shape[-2]
        else _by_steps(X, iterations)
    )
    return X.mT if tall else X


def _by_steps(X: Tensor, iterations: int) -> Tensor:
    """X = a X + (b A + c A A) X with A = X X^T, so many times."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(iterations):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def _by_squares(X: Tensor, iterations: int) -> Tensor:
    """The same for a wide X, which is multiplied twice in all and not in each iteration: A becomes
    F A F with F = a + b A + c A A, and X the product of all F times X."""
    if not iterations:
        return X
    a, b, c = NEWTON_SCHULZ
    A, product = X @ X.mT, None
    for left in reversed(range(iterations)):
        F = b * A + c * A @ A
        F.diagonal(dim1=-2, dim2=-1).add_(a)
        product = F if product is None else F @ product
        A = F @ A @ F if left else A
    assert product is not None
    return product @ X
