from pydantic import NonNegativeFloat

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.layerwise import ByLayer
from prefed.rules import Rule
from prefed.rules.common_direction import Common


@ALGORITHMS.register("prefedc")
class PreFedC(ByLayer):
    """PreFed with one spectral direction for all clients (decision 049): m and P are PreFed's,
    averaged with the weights. Once a round, from the server's m and P, for each weight matrix

        u = orthogonal(m) / (sqrt(P) + tau)             scaled to the norm of orthogonal(m)

    and in each step of a client, whose m and P go on from the server's,

        m = beta1*m + (1 - beta1)*g
        P = beta2*P + (1 - beta2)*(g - m)^2
        own = (g - m) / (sqrt(P) + tau) / sqrt(max(rows, columns))
        w = w - lr * sqrt(max(1, rows/columns)) * (u + own_lr*own)
        w = w - lr * plain_lr * m / (sqrt(P) + tau)     for vectors; for embeddings embedding_lr

    So what clients have in common is made orthogonal, once for all of them; what each has of its
    own is divided by the root of its own variance. tau is tau_relative times the root mean square
    of sqrt(P) over the matrix, over the embedding, or over all vectors. Both m and P are corrected
    for their start at zero. In the first round there is no P yet, and matrices stand still. The
    model that is handed over is the mean of w over rounds (mean_of_rounds). Upload 3d;
    PreFedCLite's is 1.01d.
    """

    beta1: Fraction = 0.9
    """The decay of m, the moving average of the gradient."""
    own_lr: NonNegativeFloat = 1.0
    """The step size along a client's own distance from m, as a share of that along u."""

    def client_rule(self) -> Rule:
        return Common(**self.rule_options, own_lr=self.own_lr)
