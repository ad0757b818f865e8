from dataclasses import dataclass
from typing import Annotated

from pydantic import Field as Limits
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.directed import DIRECTION, Directed
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import Field, Rule, State

Share = Annotated[float, Limits(gt=0, le=1)]


@ALGORITHMS.register("fedcm")
class FedCM(Directed):
    """Xu et al. 2021: momentum on the clients that all of them share. A local step is

        w -= lr * (alpha * g + (1 - alpha) * direction)

    with the mean direction of the last round. With a constant client_lr it is FedAvg with
    align = 1 - alpha and align_form = "mixed".

    server_lr = 1 takes the mean of the clients. The paper's eta_g multiplies the direction: its
    eta_g is our server_lr * client_lr * K. The paper's experiments have client_lr = 0.1, times
    0.998 in each round, and weight_decay = 0.001.
    """

    client_lr: Rate = 0.05
    alpha: Share = 0.1
    """The share of the client's own gradient in a step."""

    def client_rule(self) -> Rule:
        return DirectedSGD(self.alpha)


@dataclass(frozen=True)
class DirectedSGD(Rule):
    """w -= lr * (alpha * g + (1 - alpha) * direction)."""

    alpha: float

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {DIRECTION: Field((layout.size,))}

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        w.add_(g, alpha=-lr * self.alpha)
        w.add_(state[DIRECTION], alpha=-lr * (1 - self.alpha))
