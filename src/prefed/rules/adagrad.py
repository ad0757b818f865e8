from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules.rule import RULES, Field, Rule, State


@RULES.register("adagrad")
@dataclass(frozen=True)
class AdaGrad(Rule):
    """v += g^2, w -= lr * g / (sqrt(v) + tau).

    tau   bounds the step where v is small
    v0    the first v
    """

    tau: PositiveFloat = 1e-3
    v0: NonNegativeFloat = 0.0

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"v": Field((layout.size,), self.v0, nonnegative=True)}

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        v = state["v"].addcmul_(g, g)
        w.addcdiv_(g, v.sqrt().add_(self.tau), value=-lr)

    def in_c(self) -> str:
        return f"""
    const real tau = {self.tau!r};
    for (int64_t i = 0; i < SIZE; i++) {{
        v[i] += g[i] * g[i];
        w[i] -= lr * g[i] / (SQRT(v[i]) + tau);
    }}"""

    def preconditioner(self) -> tuple[str, float]:
        return "v", self.tau
