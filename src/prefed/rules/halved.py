"""State in bfloat16: half the memory of m and P on a client that trains."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.layout import Layout
from prefed.rules.rule import BLOCK, Field, Rule, State
from prefed.rules.wrapped import Wrapped

Draw = Callable[[int, int], np.random.Generator]
"""(row, step) -> the random numbers of a client's step."""


@dataclass(frozen=True)
class Halved(Wrapped):
    """Another rule, whose vectors of state are held in bfloat16 between its steps.

    A step is computed in the type of the weights, a part of the vectors at a time. What it leaves
    is rounded up or down at random, so that its mean is right: rounded to the nearest, a moving
    average stands still as soon as it should move by less than a 512th of itself, as P with
    beta2 = .999 does.
    """

    draw: Draw

    def fields(self, layout: Layout) -> dict[str, Field]:
        vector, found = (layout.size,), super().fields(layout)
        return {
            name: replace(field, dtype=torch.bfloat16) if field.shape == vector else field
            for name, field in found.items()
        }

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        draws, size = [self.draw(row, k) for row in range(len(w))], w.shape[-1]
        vectors = {name: value for name, value in state.items() if value.shape == w.shape}
        numbers = {name: value for name, value in state.items() if value.shape != w.shape}
        for first in range(0, size, BLOCK):
            part, is_last = slice(first, first + BLOCK), first + BLOCK >= size
            wide = {name: value[:, part].to(w.dtype) for name, value in vectors.items()}
            # Numbers that are of all coordinates, as the masses of bias correction, go on once.
            own = {name: value if is_last else value.clone() for name, value in numbers.items()}
            self.rule.step(w[:, part], g[:, part], wide | own, lr, k)
            for name, value in wide.items():
                vectors[name][:, part] = rounded(value, noise(draws, value.shape[-1]))


def check_halved(rule: Rule, layout: Layout) -> None:
    """Raise if the state of a client rule cannot be held so."""
    looks_back = any(
        getattr(type(rule), name) is not getattr(Rule, name) for name in ("begin", "finish")
    )
    shapes = ((layout.size,), (1,))
    whole = all(field.shape in shapes for field in rule.fields(layout).values())
    if looks_back or not whole or not rule.in_parts or rule.lockstep or rule.other(0) is not None:
        raise PrefedError(
            f"state_dtype: the client rule, {type(rule).__name__}, does more than step each "
            f"coordinate by itself; bfloat16 is for covariance (diagonal, without tau_relative), "
            f"adam, adagrad, lion and sgd"
        )


def give(rows: Tensor, value: Tensor, draws: Callable[[], list[np.random.Generator]]) -> None:
    """Set each row (C, d), in bfloat16, to the value (d), rounded at random; `draws` has the random
    numbers of each row."""
    drawn = draws()
    for first in range(0, len(value), BLOCK):
        part = value[first : first + BLOCK].expand(len(rows), -1)
        rows[:, first : first + BLOCK] = rounded(part, noise(drawn, part.shape[-1]))


def noise(draws: list[np.random.Generator], size: int) -> Tensor:
    """The next `size` random numbers of 16 bits of each row, as int32."""
    words = [draw.bit_generator.random_raw(-(-size // 4)) for draw in draws]
    return torch.from_numpy(np.stack(words).view(np.uint16).astype(np.int32))[:, :size]


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """x in bfloat16, rounded away from zero with the chance of what truncation would lose; infinity
    and NaN stay what they are."""
    x = x.to(torch.float32)
    pattern = (x.view(torch.int32) + bits.to(x.device)).bitwise_and_(-(1 << 16))
    return torch.where(x.isfinite(), pattern.view(torch.float32), x).to(torch.bfloat16)
