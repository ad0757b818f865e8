from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules.rule import OTHER, RULES, Field, Fraction, Other, Rule, State, accumulate


@RULES.register("sophia")
@dataclass(frozen=True)
class Sophia(Rule):
    """Liu et al. 2023, Sophia-G: m = beta1*m + (1 - beta1)*g, in every `refresh`-th step
    h = beta2*h + (1 - beta2)*B*s^2, and w -= lr * clip(m / max(gamma*h, tau)) between -1 and 1.

    s is the gradient of the step's batch of B targets with labels drawn from the model's own output
    (Gauss-Newton-Bartlett), so the loss has to be cross_entropy or bce. Steps are counted in each
    round anew: h is refreshed in step 0 of every round, then after `refresh` steps. The paper is
    followed; its code has tau added to gamma*h.

    beta1     the decay of m, the moving average of the gradient
    beta2     the decay of h, the moving average of the estimated second derivatives
    gamma     the larger, the less is clipped
    refresh   steps between two estimates
    tau       bounds the quotient where h is small
    """

    beta1: Fraction = 0.96
    beta2: Fraction = 0.99
    gamma: PositiveFloat = 0.05
    refresh: PositiveInt = 10
    tau: PositiveFloat = 1e-12

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"m": Field((layout.size,)), "h": Field((layout.size,), nonnegative=True)}

    def other(self, k: int) -> Other | None:
        return "drawn" if k % self.refresh == 0 else None

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m, h = state["m"].lerp_(g, 1 - self.beta1), state["h"]
        if OTHER in state:
            accumulate(h, state[OTHER], self.beta2, "ema")
        w.sub_((m / (self.gamma * h).clamp_(min=self.tau)).clamp_(-1, 1), alpha=lr)
