from dataclasses import dataclass, field

from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules.rule import RULES, Field, Fraction, Rule, State


@RULES.register("sgd")
@dataclass(frozen=True)
class SGD(Rule):
    """w -= lr * g, or with momentum: momentum = mu * momentum + g, w -= lr * momentum.

    As a server rule with lr = 1 it takes the clients' mean, since g is minus their mean change.

    momentum   mu, the share of the buffer that stays
    nesterov   the step is g + mu * momentum
    """

    momentum: Fraction = 0.0
    nesterov: bool = field(default=False, kw_only=True)

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"momentum": Field((layout.size,))} if self.momentum else {}

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        w.add_(self.direction(g, state), alpha=-lr)

    def direction(self, g: Tensor, state: State) -> Tensor:
        """The gradient, or the buffer that it has been added to."""
        if not self.momentum:
            return g
        buffer = state["momentum"].mul_(self.momentum).add_(g)
        return g.add(buffer, alpha=self.momentum) if self.nesterov else buffer

    def in_c(self) -> str:
        if not self.momentum:
            return "for (int64_t i = 0; i < SIZE; i++) w[i] -= lr * g[i];"
        step = "g[i] + mu * momentum[i]" if self.nesterov else "momentum[i]"
        return f"""
    const real mu = {self.momentum!r};
    for (int64_t i = 0; i < SIZE; i++) {{
        momentum[i] = mu * momentum[i] + g[i];
        w[i] -= lr * ({step});
    }}"""
