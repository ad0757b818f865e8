"""Algorithms that leave a part of the model with each client. `personal` is an option of every
algorithm; these are FedAvg with the parts that their papers leave."""

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.fedavg import FedAvg
from prefed.core.patterns import Patterns
from prefed.rules import Rule, State
from prefed.rules.wrapped import Wrapped


@ALGORITHMS.register("fedper")
class FedPer(FedAvg):
    """Arivazhagan et al. 2019: the last layer, or what `personal` names, stays with the client."""

    personal: Patterns = ("@last",)


@ALGORITHMS.register("fedrep")
class FedRep(FedPer):
    """Collins et al. 2021: as FedPer, but the parts move in turns: in the first `personal_steps` of
    a round only the personal one, in the others only the one that is shared."""

    personal_steps: PositiveInt = 1
    """The first steps of a round, in which only the personal part moves."""

    def in_turns(self, rule: Rule, shared: int) -> Rule:
        return InTurns(rule, shared, self.personal_steps)


@ALGORITHMS.register("fedbn")
class FedBN(FedAvg):
    """Li et al. 2021: normalisation layers stay with the client, with their statistics. A model
    without such layers is refused."""

    personal: Patterns = ("@norm",)
    statistics: Literal["average", "keep", "reset"] = "keep"


@dataclass(frozen=True)
class InTurns(Wrapped):
    """A rule whose state is of vectors, on one part of the weights at a time: the other rests, and
    so does its state."""

    shared: int
    personal_steps: int

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        first = slice(self.shared, None) if k < self.personal_steps else slice(self.shared)
        whole = {"w": w, "g": g} | state
        parts = {name: value[..., first].contiguous() for name, value in whole.items()}
        moving = {name: parts[name] for name in state}
        self.rule.apply(parts["w"], parts["g"], moving, lr, k)
        w[..., first] = parts["w"]
        for name, value in moving.items():
            state[name][..., first] = value
