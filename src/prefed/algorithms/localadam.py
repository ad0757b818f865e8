from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.sharing import Policy, average, keep, reset
from prefed.core.schedule import Rate
from prefed.rules import Adam, Rule


@ALGORITHMS.register("localadam")
class LocalAdam(Algorithm):
    """Adam on the clients, weights averaged: what one gets by handing FedAvg's clients Adam.

    state="reset" begins each round with m = v = 0 (upload d), "average" sends both with the
    weights (3d), "keep" leaves them with the clients (d).
    """

    client_lr: Rate = 0.001
    beta1: Fraction = 0.9
    """The decay of m, the moving average of the gradient."""
    beta2: Fraction = 0.99
    """The decay of v, the moving average of its squares."""
    tau: PositiveFloat = 1e-3
    """Added to sqrt(v), it bounds the step where v is small."""
    v0: NonNegativeFloat = 0.0
    """The first v."""
    bias_correction: bool = True
    """Divide m and v by 1 - beta^t, as Adam does."""
    tau_inside: bool = False
    """sqrt(v + tau^2) in place of sqrt(v) + tau."""
    state: Literal["reset", "average", "keep"] = "reset"
    """What happens to m and v at the end of a round."""

    def client_rule(self) -> Rule:
        return Adam(
            self.beta1, self.tau, self.v0, self.bias_correction, self.tau_inside, self.beta2
        )

    def sharing(self) -> dict[str, Policy]:
        policy = {"reset": reset, "average": average, "keep": keep}[self.state]()
        return dict.fromkeys(("m", "v", "m_mass", "v_mass"), policy)
