from typing import ClassVar

from pydantic import PositiveInt

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.layerwise import ByLayer
from prefed.rules import Rule
from prefed.rules.spectral import Spectral


@ALGORITHMS.register("prefeds")
class PreFedS(ByLayer):
    """PreFed with spectral steps (decision 044): m and P are PreFed's, averaged with the weights,
    and the step of a weight matrix is that of Muon, its entries divided by sqrt(P) + tau.

        m = beta1*m + (1 - beta1)*g                     on each client, from the server's m and P
        P = beta2*P + (1 - beta2)*(g - m)^2
        O = orthogonal((1 - beta1)*g + beta1*m)         for each weight matrix (rows, columns)
        u = O / (sqrt(P) + tau)                         scaled to the norm of O
        w = w - lr * sqrt(max(1, rows/columns)) * u
        w = w - lr * plain_lr * m / (sqrt(P) + tau)     for vectors; for embeddings embedding_lr

    tau is tau_relative times the root mean square of sqrt(P) over the matrix, over the embedding,
    or over all vectors. Both m and P are corrected for their start at zero. The model that is
    handed over is the mean of w over rounds (mean_of_rounds).
    Upload 3d; PreFedSLite's is 1.01d.
    """

    later: ClassVar[tuple[str, ...]] = ("refresh",)

    refresh: PositiveInt = 1
    """Local steps of a matrix along one orthogonal direction, that of the first of them, which
    alone takes matrix products."""

    def client_rule(self) -> Rule:
        return Spectral(**self.rule_options, refresh=self.refresh)
