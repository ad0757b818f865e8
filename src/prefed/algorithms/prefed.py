from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from prefed.algorithms.base import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.rules import Covariance, FullCovariance, Rule
from prefed.rules.covariance import Accumulate
from prefed.schedule import Rate
from prefed.sharing import BY_NAME, Policy, average

Shape = Literal["diagonal", "full"]
COVARIANCE: dict[Shape, type[Covariance]] = {"diagonal": Covariance, "full": FullCovariance}


@ALGORITHMS.register("prefed")
class PreFed(Algorithm):
    """Algorithm 2 of the paper: the covariance rule on the clients, P averaged with the weights.

    The listing starts each client from the server's m, but never says how the server comes by it.
    `momentum` names the three readings: "average" it like P (upload 3d), "reset" it in each
    round, or let each client "keep" its own (upload 2d).
    """

    client_lr: Rate = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.9
    tau: PositiveFloat = 1e-3
    momentum: Literal["average", "reset", "keep"] = "average"
    accumulate: Accumulate = "ema"
    shape: Shape = "diagonal"
    bias_correction: bool = False

    def client_rule(self) -> Rule:
        return COVARIANCE[self.shape](
            self.beta1, self.beta2, self.tau, self.accumulate, bias_correction=self.bias_correction
        )

    def sharing(self) -> dict[str, Policy]:
        m, P = BY_NAME[self.momentum](), average()
        return {"m": m, "m_mass": m, "P": P, "P_mass": P}
