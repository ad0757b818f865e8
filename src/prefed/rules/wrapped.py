"""Rules around rules: what options of every algorithm add to the steps of a client rule."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules.rule import Field, Other, Rule, State

MEAN_CHANGE = "mean_change"
"""The clients' mean change of the last round, as the server has it. In the state of a client: what
it moves by in each step."""


@dataclass(frozen=True)
class Wrapped(Rule):
    """Another rule, with something more in `apply`."""

    rule: Rule

    @property
    def lockstep(self) -> bool:  # type: ignore[override]
        return self.rule.lockstep

    @property
    def begins_alike(self) -> bool:  # type: ignore[override]
        return self.rule.begins_alike

    def fields(self, layout: Layout) -> dict[str, Field]:
        return self.rule.fields(layout)

    def begin(self, w: Tensor, state: State) -> None:
        self.rule.begin(w, state)

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        self.rule.step(w, g, state, lr, k)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        self.rule.finish(w, state, lr, steps)

    def other(self, k: int) -> Other | None:
        return self.rule.other(k)


@dataclass(frozen=True)
class Decayed(Wrapped):
    """w -= lr * decay * w before each step: AdamW is Adam so."""

    decay: float

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        w.mul_(1 - lr * self.decay)
        self.rule.apply(w, g, state, lr, k)


@dataclass(frozen=True)
class Rising(Wrapped):
    """Step k of a round is of lr times a factor of its own."""

    factor: Callable[[int], float]

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        self.rule.apply(w, g, state, lr * self.factor(k), k)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        """With the mean over the steps that were taken, which may be fewer than a round has."""
        self.rule.finish(w, state, lr * fmean(map(self.factor, range(steps))), steps)


@dataclass(frozen=True)
class Aligned(Wrapped):
    """w += own * (the step of the rule) + mean_change, on the part of the weights that is shared;
    the personal part takes the step of the rule alone."""

    shared: int
    own: float

    def fields(self, layout: Layout) -> dict[str, Field]:
        return super().fields(layout) | {MEAN_CHANGE: Field((self.shared,))}

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        part, rest = w[..., : self.shared], {n: v for n, v in state.items() if n != MEAN_CHANGE}
        before = part.clone() if self.own < 1 else part
        self.rule.apply(w, g, rest, lr, k)
        if self.own < 1:
            part.lerp_(before, 1 - self.own)
        part.add_(state[MEAN_CHANGE])

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        """To a rule that looks back at how far it came, that is its own steps."""
        part, along = w[..., : self.shared], state[MEAN_CHANGE] * steps
        part.sub_(along)
        self.rule.finish(w, state, lr * self.own, steps)
        part.add_(along)
