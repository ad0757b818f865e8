from dataclasses import dataclass

from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.sharing import Policy, average, keep
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import SGD, Field, Rule, State


@ALGORITHMS.register("scaffold")
class SCAFFOLD(Algorithm):
    """Karimireddy et al. 2020, option II: control variates against client drift.

    Each client keeps c_i; the server's c is the mean over all clients, taking part or not, so it
    moves towards the cohort's mean by the share of clients that took part.
    """

    client_lr: Rate = 0.05
    client_momentum: Fraction = 0.0
    """Of the gradient alone, as in the code of NIID-Bench: w -= lr * (buffer + c - c_i). The buffer
    begins at zero in each round."""

    def client_rule(self) -> Rule:
        return ControlledSGD(self.client_momentum)

    def sharing(self) -> dict[str, Policy]:
        return {"c": average(follow="participation"), "c_i": keep()}


@dataclass(frozen=True)
class ControlledSGD(SGD):
    """w -= lr * (g + c - c_i); after the round c_i = c_i - c + (w_start - w) / (steps * lr)."""

    def fields(self, layout: Layout) -> dict[str, Field]:
        own = {name: Field((layout.size,)) for name in ("c", "c_i", "w_start")}
        return super().fields(layout) | own

    def begin(self, w: Tensor, state: State) -> None:
        state["w_start"].copy_(w)

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        w.add_((self.direction(g, state) + state["c"]).sub_(state["c_i"]), alpha=-lr)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        if lr == 0:  # nothing moved, and nothing is learnt
            return
        c, c_i = state["c"], state["c_i"]
        change = (state["w_start"] - w).div_(steps * lr).sub_(c)
        c_i.add_(change)
        c.add_(change)  # so that the mean over the cohort is c plus the mean change of c_i
