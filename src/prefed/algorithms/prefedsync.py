from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.sharing import Policy, average
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import Field, Rule
from prefed.rules.covariance import Accumulate
from prefed.rules.rule import State, accumulate


@ALGORITHMS.register("prefedsync")
class PreFedSync(Algorithm):
    """The paper's basic rule: the cohort's mean gradient is formed anew in every local step.

    The yardstick for what PreFed loses by synchronising once a round. Each step costs every
    client a gradient up and the mean gradient down; P is averaged at the end of a round.
    """

    client_lr: Rate = 0.01
    tau: PositiveFloat = 1e-3
    """Added to sqrt(P), it bounds the step where P is small."""
    accumulate: Accumulate = "sum"
    """P is a "sum", as printed, or an exponential moving average ("ema")."""
    beta2: Fraction = 0.9
    """Only for accumulate="ema"."""

    def client_rule(self) -> Rule:
        return CenteredCovariance(self.tau, self.accumulate, self.beta2)

    def sharing(self) -> dict[str, Policy]:
        return {"P": average()}


@dataclass(frozen=True)
class CenteredCovariance(Rule):
    """P += (g - mean)^2, w -= lr * g / (sqrt(P) + tau), with the cohort's mean gradient."""

    lockstep: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False

    tau: float
    accumulate: Accumulate
    beta2: float

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"P": Field((layout.size,), nonnegative=True)}

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        P = state["P"]
        accumulate(P, g - state["mean"], self.beta2, self.accumulate)
        w.addcdiv_(g, P.sqrt().add_(self.tau), value=-lr)

    def preconditioner(self) -> tuple[str, float]:
        return "P", self.tau
