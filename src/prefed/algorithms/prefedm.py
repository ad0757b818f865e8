from pydantic import NonNegativeFloat, PositiveFloat

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.preconditioned import Preconditioned
from prefed.algorithms.sharing import Policy, average
from prefed.codecs import CodecName
from prefed.core.schedule import Rate
from prefed.rules import SGD, Rule


@ALGORITHMS.register("prefedm")
class PreFedM(Preconditioned):
    """PreFed whose momentum is the server's, and whose model is a mean over rounds (decision 042).

    Clients step with the gradient itself, so that a client that has learnt its own samples stands
    still, and with a P that a round hardly changes; P is averaged with the weights as in PreFed.
    Each round, with m from 0, and c the weight that P has gathered (bias correction):

        m = beta1*m + (1 - beta1)*g                     on each client, K times
        P = beta2*P + (1 - beta2)*(g - m)^2
        w = w - lr * g / (sqrt(P/c) + tau)
        v = server_momentum*v + (mean change of w)      on the server
        w = w + server_lr * v

    tau is a tenth of the root mean square of sqrt(P/c), without units. The model that is handed
    over is the mean of w over rounds (mean_of_rounds).
    Upload 2d; PreFedMLite's is 0.76d.
    """

    client_lr: Rate = 0.004
    server_momentum: Fraction = 0.7
    """The share of the last rounds' changes that stays."""
    beta2: Fraction = 0.999
    """The decay of P, the moving average of the squared distance from m."""
    tau_relative: PositiveFloat | None = 0.1
    """tau as a share of the root mean square of sqrt(P) over all weights; None for tau itself."""
    bias_correction: bool = True
    """Divide P by the weight that it has gathered."""
    mean_of_rounds: NonNegativeFloat | None = 4.0
    """The model is the mean of the global weights over rounds, later ones counting more; None for
    the last weights."""
    P_codec: CodecName = "exact"
    """The codec of P on its way to the server."""

    def client_rule(self) -> Rule:
        return self.covariance(step_with="g")

    def server_rule(self) -> Rule:
        return SGD(self.server_momentum)

    def sharing(self) -> dict[str, Policy]:
        return {"P": average(codec=self.P_codec), "P_mass": average()}
