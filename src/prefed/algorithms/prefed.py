from __future__ import annotations

from typing import Literal

from prefed.algorithms.base import ALGORITHMS
from prefed.algorithms.preconditioned import Preconditioned
from prefed.rules import Rule
from prefed.schedule import Rate
from prefed.sharing import BY_NAME, Policy, average


@ALGORITHMS.register("prefed")
class PreFed(Preconditioned):
    """Algorithm 2 of the paper: the covariance rule on the clients, P averaged with the weights.

    The listing starts each client from the server's m, but never says how the server comes by it.
    `momentum` names the three readings: "average" it like P (upload 3d), "reset" it in each
    round, or let each client "keep" its own (upload 2d).
    """

    client_lr: Rate = 0.001
    momentum: Literal["average", "reset", "keep"] = "average"

    def client_rule(self) -> Rule:
        return self.covariance(step_with="m")

    def sharing(self) -> dict[str, Policy]:
        m, P = BY_NAME[self.momentum](), average()
        return {"m": m, "m_mass": m, "P": P, "P_mass": P}
