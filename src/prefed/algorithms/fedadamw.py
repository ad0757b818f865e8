from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.directed import DIRECTION, Directed
from prefed.algorithms.sharing import Policy, average
from prefed.core.layout import Entry, Layout
from prefed.core.schedule import Rate
from prefed.rules import Adam, Field, Fraction, Rule, State
from prefed.rules.rule import mean_of_last

Means = Literal["tensor", "row", "whole"]


@ALGORITHMS.register("fedadamw")
class FedAdamW(Directed):
    """Liu et al. 2025: AdamW on the clients with a step along the mean direction of the last round,
    and v from the server, which has its mean over each block of weights.

        w -= lr * (m / (1 - beta1^k) / (sqrt(v / (1 - beta2^t)) + tau) + alpha * direction
                   + decoupled_weight_decay * w)

    m begins at zero in each round, k counts its steps and t those of all rounds. v begins with the
    server's means; the means of the clients' v go up and come down, a number for each block
    (upload d, and the number of blocks).

    Where the paper and its code disagree, this is the paper:

    - v: the code sends all of it, as means = "whole" does here (upload 2d). A block is a tensor of
      the model, as a line in the code has it that is commented out, or a "row" of one. The paper
      has more for attention, by heads, which the names of tensors do not tell.
    - m: the code divides by 1 - beta1^t, which after the first round is one.
    - weight decay: the paper prints it with the wrong sign; the code has AdamW's, and so have we.
    """

    client_lr: Rate = 3e-4
    alpha: NonNegativeFloat = 0.5
    """How much of the mean direction is added to each step."""
    beta1: Fraction = 0.9
    """The decay of m, the moving average of the gradient."""
    beta2: Fraction = 0.999
    """The decay of v, the moving average of its squares."""
    tau: PositiveFloat = 1e-8
    """Added to sqrt(v), it bounds the step where v is small."""
    decoupled_weight_decay: NonNegativeFloat = 0.01
    """Clients take this times the step size of the weights away before each step."""
    means: Means = "tensor"
    """What is averaged of v: its mean over each "tensor", over each output "row" of a tensor (then
    all numbers of a bias), or the "whole" of it."""

    def client_rule(self) -> Rule:
        return DirectedAdam(
            beta1=self.beta1,
            tau=self.tau,
            bias_correction=True,
            beta2=self.beta2,
            alpha=self.alpha,
            means=self.means,
        )

    def sharing(self) -> dict[str, Policy]:
        v = "v" if self.means == "whole" else "v_means"
        return super().sharing() | {v: average(), "v_mass": average()}


@dataclass(frozen=True)
class DirectedAdam(Adam):
    """Adam, and w -= lr * alpha * direction. Where means of v are shared, v begins with them."""

    alpha: float = 0.0
    means: Means = "whole"
    layout: Layout | None = None
    """Known after `fit`."""

    def fit(self, layout: Layout) -> Self:
        return replace(self, layout=layout)

    def fields(self, layout: Layout) -> dict[str, Field]:
        fields = super().fields(layout) | {DIRECTION: Field((layout.size,))}
        if self.means != "whole":
            numbers = sum(self.groups(entry) for entry in layout.entries)
            fields["v_means"] = Field((numbers,), nonnegative=True)
        return fields

    def groups(self, entry: Entry) -> int:
        """How many means a tensor has."""
        if not prod(entry.shape):
            return 0
        return entry.shape[0] if self.means == "row" and entry.shape else 1

    def begin(self, w: Tensor, state: State) -> None:
        for v, means in self.blocks(state):
            v.copy_(means.view(*means.shape, *[1] * (v.dim() - means.dim())).expand_as(v))

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        super().step(w, g, state, lr, k)
        w.add_(state[DIRECTION], alpha=-lr * self.alpha)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        for v, means in self.blocks(state):
            means.copy_(mean_of_last(v.reshape(*means.shape, -1)))

    def blocks(self, state: State) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor inside v, (C, ...), and its means (C, n)."""
        assert self.layout is not None
        entries = self.layout.entries if self.means != "whole" else ()
        first = 0
        for entry in entries:
            if groups := self.groups(entry):
                v = entry.view(state["v"])
                yield (
                    v if entry.shape else v.unsqueeze(-1),
                    state["v_means"][..., first:][..., :groups],
                )
                first += groups
