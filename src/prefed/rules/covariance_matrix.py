"""What the covariance rules with off-diagonal entries share: when roots are derived and applied."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from prefed.core.layout import Entry, Layout, row_major, strided
from prefed.rules.covariance import Covariance
from prefed.rules.refreshed import STEPS_LEFT, due
from prefed.rules.remembered import remembered
from prefed.rules.rule import Field, Rule, State


@dataclass(frozen=True)
class MatrixCovariance(Covariance):
    """P holds matrices; the step is (P^(1/2) + tau*I)^(-1) m.

    P is what is shared, averaged and saved. The inverse root is derived from it by an
    eigendecomposition in float64 where it is used. With refresh = 1 that is in every step. With
    more, a client derives it from the server's P when its round begins and from its own after
    every `refresh` steps; the server in every `refresh`-th round. In between it stays in the
    state, so that a resumed run goes on with the same one.
    """

    elementwise: ClassVar[bool] = False
    begins_alike: ClassVar[bool] = True
    one_matrix: ClassVar[bool] = False
    """P is a single matrix, and not several in some packing."""

    refresh: int = 1
    layout: Layout | None = None
    """Known after `fit`."""

    def fit(self, layout: Layout) -> Self:
        return replace(self, layout=layout)

    def fused(self, w: Tensor) -> Rule:
        return self

    def with_clients(self, P: Tensor) -> Tensor:
        return P.unsqueeze(0)

    def fields(self, layout: Layout) -> dict[str, Field]:
        fitted = self.fit(layout)
        P = Field(fitted.kept_shape(), nonnegative=self.one_matrix)
        fields = {"m": Field((layout.size,)), "P": P} | self.masses()
        if self.refresh > 1:
            root = Field(fitted.root_shape(), cache=True)
            fields |= {"root": root, "steps_left": STEPS_LEFT}
        return fields

    def begin(self, w: Tensor, state: State) -> None:
        """All clients begin with the same P, so its root is derived once and remembered: once a
        round and thread. The zeros before the first round tell nothing yet; where clients keep P,
        that is the first of each."""
        if self.refresh == 1:
            return
        P, root, steps_left = (_rows(state[name], w) for name in ("P", "root", "steps_left"))
        known_rows = P.flatten(1).any(1).nonzero().view(-1)
        if "P_mass" in state:
            P = P / _rows(state["P_mass"], w).view(-1, *[1] * (P.dim() - 1))
        steps_left[known_rows] = self.refresh
        for row in known_rows.tolist():
            own = P[row : row + 1]
            root[row].copy_(remembered(self, [own], partial(self.derive, own))[0])

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m, P = state["m"], state["P"]
        m.lerp_(g, 1 - self.beta1)
        keep, take = (self.beta2, 1 - self.beta2) if self.accumulate == "ema" else (1.0, 1.0)
        self.add_outer(_rows(P, w), _rows(g - m, w), keep, take)
        u, P = self.corrected(g, state)
        self.move(_rows(w, w), self.current_root(_rows(P, w), state, w), _rows(u, w), lr)

    def current_root(self, P: Tensor, state: State, w: Tensor) -> Tensor:
        """The root for this step."""
        if self.refresh == 1:
            return self.derive(P)
        root = _rows(state["root"], w)
        if (rows := due(state["steps_left"], self.refresh)) is not None:
            root[rows] = self.derive(P[rows])
        return root

    @abstractmethod
    def kept_shape(self) -> tuple[int, ...]:
        """Of the field P, for one holder."""

    @abstractmethod
    def root_shape(self) -> tuple[int, ...]:
        """Of what `derive` makes of it."""

    @abstractmethod
    def add_outer(self, P: Tensor, r: Tensor, keep: float, take: float) -> None:
        """P = keep*P + take*(outer product of r), for each row, in place."""

    @abstractmethod
    def mean_variance(self, P: Tensor) -> Tensor:
        """The mean of the diagonal, for each row."""

    @abstractmethod
    def derive(self, P: Tensor) -> Tensor:
        """What `move` needs of P."""

    @abstractmethod
    def move(self, w: Tensor, root: Tensor, u: Tensor, lr: float) -> None:
        """w -= lr * (P^(1/2) + tau*I)^(-1) u, for each row."""


def _rows(x: Tensor, w: Tensor) -> Tensor:
    """With a dimension for clients, whether w has one or not."""
    return x.unsqueeze(0) if w.dim() == 1 else x


def matrices(rows: Tensor, entry: Entry) -> Tensor:
    """A tensor of the model inside each row as a matrix: (C, first dimension, all the others).

    A copy where the memory format does not allow a view.
    """
    shape = entry.shape or (1,)
    if len(shape) < 2 or entry.stride == row_major(shape):
        return part(rows, entry.offset, (shape[0], math.prod(shape[1:])))
    return entry.view(rows).flatten(2)


def part(rows: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """A part of each row in this shape, sharing its memory."""
    return strided(rows, start, shape, row_major(shape))


def eigen(P: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of covariances, in float64.

    Eigenvalues that are zero but for the rounding of the factorisation become zero: a root would
    make 1e-9 of their 1e-18. Where P is not finite they are NaN.
    """
    finite = P.isfinite().all(-1).all(-1)[..., None]
    values, V = torch.linalg.eigh(P.double().where(finite[..., None], 0.0))
    noise = values[..., -1:] * (P.shape[-1] * torch.finfo(torch.float64).eps)
    return values.where(values > noise, 0.0).where(finite, torch.nan), V


def inverse_roots(P: Tensor, tau: Tensor | float) -> Tensor:
    """(P^(1/2) + tau*I)^(-1), computed in float64. A tau for each client is (C, 1)."""
    values, V = eigen(P)
    if isinstance(tau, Tensor):
        tau = tau.view(-1, *[1] * (values.dim() - 1))
    return ((V / values.sqrt().add_(tau).unsqueeze(-2)) @ V.mT).to(P.dtype)
