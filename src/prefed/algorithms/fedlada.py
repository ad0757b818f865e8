from dataclasses import dataclass

from pydantic import PositiveFloat
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.directed import DIRECTION, Directed
from prefed.algorithms.fedcm import Share
from prefed.algorithms.sharing import Policy, average
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import Field, Fraction, Rule, State
from prefed.rules.rule import accumulate


@ALGORITHMS.register("fedlada")
class FedLADA(Directed):
    """Sun et al. 2023: AMSGrad on the clients, amended by the mean direction of the last round.

        m = beta1*m + (1 - beta1)*g,   v = beta2*v + (1 - beta2)*g^2,   v_max = max(v_max, v)
        w -= lr * (alpha * m / sqrt(v_max) + (1 - alpha) * direction)

    A round begins with m = 0 and with the server's v_max for both v and v_max; their means go up
    and come down. tau^2 is the first v_max, so that nothing is divided by zero.

    This is the paper's algorithm. The code of FedAdamW, which has a FedLADA to compare with, is
    another: there v is averaged, and without the maximum. server_lr = 1 takes the mean.
    """

    client_lr: Rate = 0.001
    alpha: Share = 0.1
    """The share of the client's own adaptive step."""
    beta1: Fraction = 0.9
    """The decay of m, the moving average of the gradient."""
    beta2: Fraction = 0.99
    """The decay of v, the moving average of its squares."""
    tau: PositiveFloat = 1e-8
    """The root of the first v_max."""

    def client_rule(self) -> Rule:
        return AmendedAMSGrad(self.alpha, self.beta1, self.beta2, self.tau)

    def sharing(self) -> dict[str, Policy]:
        return super().sharing() | {"v_max": average()}


@dataclass(frozen=True)
class AmendedAMSGrad(Rule):
    """w -= lr * (alpha * m / sqrt(v_max) + (1 - alpha) * direction)."""

    alpha: float
    beta1: float
    beta2: float
    first: float
    """The root of the first v_max."""

    def fields(self, layout: Layout) -> dict[str, Field]:
        d = (layout.size,)
        v_max = Field(d, self.first**2, nonnegative=True)
        return {"m": Field(d), "v": Field(d, nonnegative=True), "v_max": v_max, DIRECTION: Field(d)}

    def begin(self, w: Tensor, state: State) -> None:
        state["v"].copy_(state["v_max"])

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m, v, v_max = state["m"], state["v"], state["v_max"]
        m.lerp_(g, 1 - self.beta1)
        accumulate(v, g, self.beta2, "ema")
        v_max.clamp_(min=v)
        w.addcdiv_(m, v_max.sqrt(), value=-lr * self.alpha)
        w.add_(state[DIRECTION], alpha=-lr * (1 - self.alpha))

    def preconditioner(self) -> tuple[str, float]:
        return "v_max", self.first
