from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.sharing import Policy, average
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import AdaGrad, Field, Rule, State


@ALGORITHMS.register("adaalter")
class AdaAlter(Algorithm):
    """Xie et al. 2019, as the paper tells it: AdaGrad on the clients, v averaged with the weights.

    frozen=True is the original: the denominator stands still between synchronisations, with
    k*tau^2 in place of the squares of the round's own k gradients. Set v0 = 1 with it, as there:
    from v0 = 0 the first round divides by tau alone.
    """

    client_lr: Rate = 0.01
    tau: PositiveFloat = 1e-3
    """Added to sqrt(v), it bounds the step where v is small."""
    v0: NonNegativeFloat = 0.0
    """The first v."""
    frozen: bool = False
    """The denominator stands still during a round, as in the original."""

    def client_rule(self) -> Rule:
        return (FrozenAdaGrad if self.frozen else AdaGrad)(self.tau, self.v0)

    def sharing(self) -> dict[str, Policy]:
        return {"v": average()}


@dataclass(frozen=True)
class FrozenAdaGrad(AdaGrad):
    """v += g^2, w -= lr * g / sqrt(v_sync + (k + 1)*tau^2), v_sync being v at the round's start."""

    def fields(self, layout: Layout) -> dict[str, Field]:
        return super().fields(layout) | {"v_sync": Field((layout.size,), nonnegative=True)}

    def begin(self, w: Tensor, state: State) -> None:
        state["v_sync"].copy_(state["v"])

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        state["v"].addcmul_(g, g)
        w.addcdiv_(g, state["v_sync"].add((k + 1) * self.tau**2).sqrt_(), value=-lr)
