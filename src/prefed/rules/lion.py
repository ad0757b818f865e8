from dataclasses import dataclass

from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules.rule import RULES, Field, Fraction, Rule, State


@RULES.register("lion")
@dataclass(frozen=True)
class Lion(Rule):
    """w -= lr * sign(beta1*m + (1 - beta1)*g), then m = beta2*m + (1 - beta2)*g (Chen et al. 2023).

    beta1   the share of m in the step
    beta2   the decay of m, the moving average of the gradient
    """

    beta1: Fraction = 0.9
    beta2: Fraction = 0.99

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"m": Field((layout.size,))}

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m = state["m"]
        w.sub_(m.lerp(g, 1 - self.beta1).sign_(), alpha=lr)
        m.lerp_(g, 1 - self.beta2)
