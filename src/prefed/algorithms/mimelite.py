from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat, field_validator
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.sharing import Policy, average
from prefed.core.layout import Layout
from prefed.core.schedule import Rate
from prefed.rules import Field, Fraction, Rule, State
from prefed.rules.rule import OTHER, Other


@ALGORITHMS.register("mimelite")
class MimeLite(Algorithm):
    """Karimireddy et al. 2020, MimeLite: the clients' optimiser state is the server's, and stands
    still while they step. Beside its weights a client sends the gradient of all its samples at the
    weights that it began with, and the server updates the state with the mean of these.

    The steps are those of the paper's table: SGD with momentum (1 - beta1)*g + beta1*m, and Adam
    with this over sqrt(v) + tau, both without bias correction. In fedjax, whose authors are the
    paper's, the square of g enters v before it divides, and Adam corrects for bias; the paper is
    followed.
    """

    client_lr: Rate = 0.05
    optimiser: Literal["momentum", "adam"] = "momentum"
    """What clients step by: "momentum" holds m (2d go up and down), "adam" holds m and v (2d go up,
    3d down)."""
    beta1: Fraction = 0.9
    """The decay of m, the moving average of the clients' mean gradient, over rounds."""
    beta2: Fraction = 0.99
    """Of Adam: the decay of v, the moving average of its squares."""
    tau: PositiveFloat = 1e-3
    """Of Adam: added to sqrt(v), it bounds the step where v is small. In the first round v is 0,
    so that steps are as large as it allows."""

    @field_validator("personal")
    @classmethod
    def _all_are_shared(cls, personal: tuple[str, ...]) -> tuple[str, ...]:
        if personal:
            raise ValueError("the state of all weights is the server's, so none can stay")
        return personal

    def client_rule(self) -> Rule:
        return HeldMoments(self.beta1, self.tau if self.optimiser == "adam" else None)

    def sharing(self) -> dict[str, Policy]:
        m = {"m": average(follow=1 - self.beta1)}  # what goes up for it is a gradient
        return m | ({"v": Policy("derived", 1 - self.beta2)} if self.optimiser == "adam" else {})

    def after_mean(self, mean: State) -> State:
        return mean | ({"v": mean["m"].square()} if self.optimiser == "adam" else {})


@dataclass(frozen=True)
class HeldMoments(Rule):
    """w -= lr * u, or w -= lr * u / (sqrt(v) + tau), with u = (1 - beta1)*g + beta1*m. After the
    round m is the gradient of all samples at the weights of step 0."""

    beta1: float
    tau: float | None

    def fields(self, layout: Layout) -> dict[str, Field]:
        vector = (layout.size,)
        v = {} if self.tau is None else {"v": Field(vector, nonnegative=True)}
        return {"m": Field(vector), "whole": Field(vector)} | v

    def other(self, k: int) -> Other | None:
        return "whole" if k == 0 else None

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if k == 0:
            state["whole"].copy_(state[OTHER])
        u = g.lerp(state["m"], self.beta1)
        if self.tau is not None:
            u.div_(state["v"].sqrt().add_(self.tau))
        w.sub_(u, alpha=lr)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        state["m"].copy_(state["whole"])

    def preconditioner(self) -> tuple[str, float] | None:
        return None if self.tau is None else ("v", self.tau)
