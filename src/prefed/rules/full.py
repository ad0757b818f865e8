"""The covariance rule with the whole matrix, for models small enough to hold one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefed.errors import PrefedError
from prefed.layout import Layout
from prefed.rules.base import Field, Rule, State
from prefed.rules.covariance import Covariance

LARGEST = 2048
"""More parameters than this are refused: each step factorises a matrix of their square."""


@dataclass(frozen=True)
class FullCovariance(Covariance):
    """P is the d x d covariance; the step is (P^(1/2) + tau*I)^(-1) m.

    The root comes from an eigendecomposition in float64, anew in every step. On a diagonal P this
    is the diagonal rule.
    """

    elementwise: ClassVar[bool] = False

    def fields(self, layout: Layout) -> dict[str, Field]:
        d = layout.size
        if d > LARGEST:
            raise PrefedError(
                f'shape: "full" holds a {d} x {d} matrix and factorises it in every step; it is '
                f'meant for at most {LARGEST} parameters. Use shape="diagonal"'
            )
        return {"m": Field((d,)), "P": Field((d, d), nonnegative=True)} | self.masses()

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m, P = state["m"], state["P"]
        m.lerp_(g, 1 - self.beta1)
        r = g - m
        outer = r.unsqueeze(-1) * r.unsqueeze(-2)
        P.lerp_(outer, 1 - self.beta2) if self.accumulate == "ema" else P.add_(outer)
        u, P = self.corrected(g, state)
        eigenvalues, V = torch.linalg.eigh(P.double())
        root = eigenvalues.clamp_(min=0).sqrt_().add_(self.tau)
        step = V @ ((V.mT @ u.double().unsqueeze(-1)) / root.unsqueeze(-1))
        w.add_(step.squeeze(-1).to(w.dtype), alpha=-lr)

    def fast(self, w: Tensor) -> Rule:
        return self
