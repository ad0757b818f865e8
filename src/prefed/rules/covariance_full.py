"""The covariance rule with the whole matrix, for models small enough to hold one."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.machine import total_memory
from prefed.rules.covariance import SHAPES
from prefed.rules.covariance_matrix import MatrixCovariance, eigen, inverse_roots
from prefed.rules.rule import mean_of_last

MATRICES = 10
"""The number of d x d matrices of 8 bytes that are alive at a time: the server's P, a client's, the
sum over clients, the root, and what the eigendecomposition works in."""
LARGEST = 4096
"""Whatever the memory: factorising a larger matrix takes minutes."""


@SHAPES.register("full")
@dataclass(frozen=True)
class FullCovariance(MatrixCovariance):
    """P is the d x d covariance. On a diagonal P this is the diagonal rule."""

    one_matrix: ClassVar[bool] = True

    def kept_shape(self) -> tuple[int, ...]:
        assert self.layout is not None
        d, most = self.layout.size, largest()
        if d > most:
            raise PrefedError(
                f'shape: "full" holds a {d} x {d} matrix and factorises it, in '
                f"{MATRICES * 8 * d * d / 1e9:.1f} GB; here it takes at most {most} parameters. "
                f'Use shape="kronecker", "block" or "diagonal"'
            )
        return (d, d)

    root_shape = kept_shape

    def add_outer(self, P: Tensor, r: Tensor, keep: float, take: float) -> None:
        P.mul_(keep).addcmul_(r.unsqueeze(-1), r.unsqueeze(-2), value=take)

    def mean_variance(self, P: Tensor) -> Tensor:
        return mean_of_last(P.diagonal(dim1=-2, dim2=-1))

    def root(self, P: Tensor) -> Tensor:
        """P^(1/2) + tau*I, for one holder or for a block of clients."""
        values, V = eigen(P)
        return ((V * values.sqrt().add_(self.tau_for(P)).unsqueeze(-2)) @ V.mT).to(P.dtype)

    def derive(self, P: Tensor) -> Tensor:
        return inverse_roots(P, self.tau_for(P))

    def move(self, w: Tensor, root: Tensor, u: Tensor, lr: float) -> None:
        w.sub_((root @ u.unsqueeze(-1)).squeeze(-1), alpha=lr)

    def diagonal(self, P: Tensor) -> Tensor:
        return P.diagonal()


def largest() -> int:
    """The largest number of parameters: half of this machine's memory must hold the matrices."""
    return min(LARGEST, math.isqrt(total_memory() // (2 * MATRICES * 8)))
