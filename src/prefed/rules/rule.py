"""What a rule is."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from torch import Tensor

from prefed.core.layout import Layout
from prefed.core.registry import Registry

State = dict[str, Tensor]

Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
"""A number in [0, 1): a momentum or the decay of a moving average."""

Other = Literal["whole", "drawn"]
OTHER = "other"
"""In the state of a client: the gradient that its rule asked for with `Rule.other`."""

RULES: "Registry[Callable[..., Rule]]" = Registry("rule", "prefed.rules")

BLOCK = 3 << 18
"""Numbers in a part of a vector: 3 MB of float32, so that the few vectors a rule touches stay in
the cache (bench/step.py)."""


@dataclass(frozen=True)
class Field:
    """One named piece of a rule's state: its shape for one client, and its first value."""

    shape: tuple[int, ...]
    start: float = 0.0
    nonnegative: bool = False
    """A second moment (or a mass of one): never below 0; a matrix, positive semi-definite."""
    dtype: torch.dtype | None = None
    """If not that of the weights."""
    cache: bool = False
    """What a client has worked out from its other fields, or a count of its steps: a mean over
    clients is neither."""

    def new(self, like: Tensor, clients: int | None = None) -> Tensor:
        """The first value, for one holder or for a block of clients, typed like `like`."""
        shape = self.shape if clients is None else (clients, *self.shape)
        return like.new_full(shape, self.start, dtype=self.dtype or like.dtype)


class Rule(ABC):
    """How one gradient changes the weights.

    A client rule is fed with gradients, a server rule with the pseudo-gradient (minus the mean
    change of the clients): otherwise there is no difference between the two. Rules are values
    without state of their own. Weights and state are changed in place; `w` and `g` are (d) or,
    for a block of clients, (C, d), and the same lines serve both.
    """

    elementwise: ClassVar[bool] = True
    """Each coordinate goes its own way, so some of them may stay with a client."""

    lockstep: ClassVar[bool] = False
    """The cohort meets in every step: `state["mean"]` is its mean gradient."""

    begins_alike: ClassVar[bool] = False
    """All that `begin` writes are caches (Field.cache) that follow from the rest of the state: for
    clients with the same state it is called once."""

    of_clients: ClassVar[bool] = False
    """It lives by what the server sends when a round begins: no server can step with it."""

    @property
    def in_parts(self) -> bool:
        """A step may be cut into blocks of coordinates: nothing in it is of all of them."""
        return self.elementwise

    @property
    def counts_all(self) -> bool:
        """Something in a step is worked out of all weights together."""
        return not self.in_parts

    def fields(self, layout: Layout) -> dict[str, Field]:
        """The named state for weights of this layout."""
        return {}

    def fit(self, layout: Layout) -> "Rule":
        """This rule for weights of this layout; element-wise rules need not know it."""
        return self

    def begin(self, w: Tensor, state: State) -> None:
        """Called on a client before its first step of a round."""

    @abstractmethod
    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        """One step with gradient `g`; `k` counts the steps of this round from 0."""

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        """Called on a client after its last step of a round."""

    def other(self, k: int) -> Other | None:
        """Another gradient, at the weights before step k of a client's round, that the step needs
        as `state["other"]`, on (d) or (C, d): "whole" is that of all samples of the client,
        "drawn" that of the step's batch with labels drawn from the model's own output, times the
        root of their number, so that its square estimates the diagonal of the Gauss-Newton matrix.

        A rule that needs one in any step needs one in step 0.
        """
        return None

    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Options that name parameters of the model, each of which has to name one."""
        return {}

    def written(self) -> dict[str, Any]:
        """As it stands in a config: its name, and the options that are not their defaults."""
        own: tuple[Any, ...] = fields(self) if is_dataclass(self) else ()
        given = {f.name: getattr(self, f.name) for f in own if getattr(self, f.name) != f.default}
        return {"name": RULES.name_of(type(self)), **given}

    def preconditioner(self) -> tuple[str, float] | None:
        """For adaptive rules: the field under the root, and tau. Diagnostics read it."""
        return None

    def diagonal(self, P: Tensor) -> Tensor:
        """What that field of one holder says of each coordinate (d)."""
        return P

    def damping(self, P: Tensor, mass: float = 1.0) -> float:
        """The tau that a step adds to the root of that field, as one holder has it, divided by the
        weight that it has gathered."""
        found = self.preconditioner()
        return found[1] if found else 0.0

    def fused(self, w: Tensor) -> "Rule":
        """The same rule in fewer passes over memory for weights like `w`, equal up to rounding; or
        this one."""
        return self

    def in_c(self) -> str | None:
        """A step of one client in C, equal up to rounding, for engines that compile it; None if
        nobody has written it down. `w`, `g` and the fields of the state, by their names, are arrays
        of type `real`, SIZE is their length, `lr` a number. rule.c and, if it is called,
        orthogonal.c beside the engines have functions for it."""
        return None

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        """One `step`. An element-wise rule works on large vectors part by part, each of which stays
        in the CPU's cache from the first line of the rule to the last."""
        if self.in_parts and w.numel() > BLOCK and all(s.shape == w.shape for s in state.values()):
            parts = [t.view(-1).split(BLOCK) for t in (w, g, *state.values())]
            for w_part, g_part, *rest in zip(*parts, strict=True):
                self.step(w_part, g_part, dict(zip(state, rest, strict=True)), lr, k)
        else:
            self.step(w, g, state, lr, k)


def in_c(rule: Rule) -> str | None:
    """A step of the rule in C, if its own class has one: what it inherits is of another rule."""
    return rule.in_c() if "in_c" in vars(type(rule)) else None


_local = threading.local()


def scratch(like: Tensor) -> Tensor:
    """An uninitialised tensor with the shape and type of `like`, valid until the next call in the
    same thread.

    Its memory is reused: allocating it for each part of a vector would cost more than the
    arithmetic.
    """
    key, size = (like.dtype, like.device), like.numel()
    kept: dict[object, Tensor] = _local.__dict__.setdefault("scratch", {})
    memory = kept.get(key)
    if memory is None or memory.numel() < size:
        memory = kept[key] = torch.empty(size, dtype=like.dtype, device=like.device)
    return memory[:size].view(like.shape)


PIECE = 1 << 14
"""Numbers that torch adds up in one thread, so that the sum does not depend on their number."""


def mean_of_last(x: Tensor) -> Tensor:
    """The mean over the last dimension, with the same bits for any number of threads."""
    if x.shape[-1] <= PIECE:
        return x.mean(-1)
    return torch.stack([part.sum(-1) for part in x.split(PIECE, -1)]).sum(0).div_(x.shape[-1])


def accumulate(into: Tensor, value: Tensor, beta: float, how: str) -> None:
    """into = beta*into + (1 - beta)*value^2 ("ema"), or into += value^2 ("sum")."""
    if how == "ema":
        into.mul_(beta).addcmul_(value, value, value=1 - beta)
    else:
        into.addcmul_(value, value)


def grow_mass(mass: Tensor, beta: float) -> Tensor:
    """The bias correction of an EMA that began at zero: the EMA of the number one.

    After t steps this is 1 - beta^t. Kept as a number in the state, it is shared, kept or reset
    with the vector it corrects, so the correction stays right under every sharing policy.
    """
    return mass.lerp_(torch.ones_like(mass), 1 - beta)
