from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.sharing import Policy, average
from prefed.codecs import CodecName
from prefed.core.schedule import Rate
from prefed.rules import Rule
from prefed.rules.spectral import Spectral


@ALGORITHMS.register("prefeds")
class PreFedS(Algorithm):
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

    client_lr: Rate = 0.02
    beta1: Fraction = 0.95
    """The decay of m, the moving average of the gradient."""
    beta2: Fraction = 0.999
    """The decay of P, the moving average of the squared distance from m."""
    tau_relative: PositiveFloat = 0.3
    """tau as a share of the root mean square of sqrt(P). Large values make the step Muon's."""
    iterations: NonNegativeInt = 5
    """Of Newton and Schulz; with 0 the momentum is only divided by its norm."""
    plain: tuple[str, ...] = ()
    """Patterns of names: parameters that are trained as embeddings. Those of embedding layers are,
    anyway, and those of no layer of torch's that have a name such as "positions"."""
    plain_lr: PositiveFloat = 0.1
    """The step size of vectors, as a share of client_lr."""
    embedding_lr: PositiveFloat = 0.3
    """The step size of embeddings, as a share of client_lr."""
    clip_relative: PositiveFloat | None = 10.0
    """A gradient that is more than this many times as long as m and P lead to expect is scaled down
    to that: both would remember one that explodes for long. None for any length."""
    refresh: PositiveInt = 1
    """Local steps of a matrix along one orthogonal direction, that of the first of them, which
    alone takes matrix products."""
    m_codec: CodecName = "exact"
    """The codec of m on its way to the server."""
    P_codec: CodecName = "exact"
    """The codec of P on its way to the server."""
    mean_of_rounds: NonNegativeFloat | None = 4.0
    """The model is the mean of the global weights over rounds, later ones counting more; None for
    the last weights."""

    def client_rule(self) -> Rule:
        numbers = self.beta1, self.beta2, self.tau_relative, self.iterations
        others = self.plain, self.plain_lr, self.embedding_lr, self.clip_relative
        return Spectral(*numbers, *others, refresh=self.refresh)

    def sharing(self) -> dict[str, Policy]:
        vectors = {"m": average(codec=self.m_codec), "P": average(codec=self.P_codec)}
        return vectors | {"m_mass": average(), "P_mass": average()}
