from dataclasses import dataclass

from pydantic import NonNegativeFloat
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import SGD, Field, Rule, State


@ALGORITHMS.register("fedprox")
class FedProx(Algorithm):
    """Li et al. 2020: FedAvg with a pull of strength mu towards the round's first weights."""

    client_lr: Rate = 0.05
    mu: NonNegativeFloat = 0.01
    """The strength of the pull."""
    client_momentum: Fraction = 0.0
    """Of gradient and pull together; the buffer begins at zero in each round."""

    def client_rule(self) -> Rule:
        return ProximalSGD(self.client_momentum, self.mu)


@dataclass(frozen=True)
class ProximalSGD(SGD):
    """w -= lr * (g + mu*(w - w_start)), with momentum as SGD has it."""

    mu: float = 0.0

    def fields(self, layout: Layout) -> dict[str, Field]:
        return super().fields(layout) | {"w_start": Field((layout.size,))}

    def begin(self, w: Tensor, state: State) -> None:
        state["w_start"].copy_(w)

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        super().step(w, g.add(w - state["w_start"], alpha=self.mu), state, lr, k)
