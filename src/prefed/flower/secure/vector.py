"""An update as one vector of integers, and the mean from the sum of such vectors.

    weight, clipped | loss | weights, statistics, fields, local steps: as they are averaged

All but the first two are in fixed point, times the client's weight, a whole number. The weighted
mean is then the sum of the one divided by the sum of the other.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.flower.secure.fixed_point import (
    FEWEST_BITS,
    HIGHEST,
    LOWEST,
    FixedPoint,
    Integers,
    bits_for,
)
from prefed.rules import State
from prefed.training.messages import averaged
from prefed.training.server_state import LOCAL_STEPS, Server

HEAD = 2
"""The weight, and how many numbers were cut off."""
LOSS = "loss"

CHANGE, LOSSES, STEPS = 10, 20, 40
"""Bounds, as powers of two: of a change of a weight, unless weights are larger; of a loss; of the
number of local steps."""
UNKNOWN = 16
"""Of a field that the server has no number of yet."""
ROOM = 16
"""How far above the server's own largest number in a block a field may grow in one round."""


class Wrong(Exception):
    """A sum that honest nodes cannot have made."""


@dataclass(frozen=True)
class Value:
    """One of the values that are averaged, and how it is divided into blocks."""

    like: Tensor
    sizes: tuple[int, ...]


class Form:
    """What the vector of a round looks like: known to both sides from the server's state."""

    def __init__(self, algorithm: Algorithm, server: Server) -> None:
        found = averaged(algorithm, server)
        entries = tuple(math.prod(entry.shape) for entry in server.layout.entries)
        whole = (server.layout.size,)
        self.values = {LOSS: Value(torch.zeros(1, dtype=torch.float64), (1,))} | {
            name: Value(value, entries if tuple(value.shape) == whole else (value.numel(),))
            for name, value in sorted(found.items())
        }
        for name, value in self.values.items():
            if not value.like.is_floating_point():
                raise PrefedError(f"{name}: {value.like.dtype} has no fixed point; use floats")

    @property
    def sizes(self) -> list[int]:
        return [size for value in self.values.values() for size in value.sizes]

    @property
    def length(self) -> int:
        return HEAD + sum(self.sizes)

    def exponents(self) -> list[int]:
        """The bound of each block: public, for it follows from what the server had before."""
        found = []
        for name, value in self.values.items():
            flat = value.like.detach().reshape(-1).double().cpu()
            for block in flat.split(value.sizes):
                found.append(_exponent(name, float(block.abs().max()) if len(block) else 0.0))
        return found

    def fixed_point(self, exponents: Sequence[int], total: int) -> FixedPoint:
        """With the bounds that the server named, and the most that all weights add up to."""
        if len(exponents) != len(self.sizes) or any(
            not LOWEST <= exponent <= HIGHEST for exponent in exponents
        ):
            raise PrefedError("the server's bounds do not fit the vector")
        bits = bits_for(total) if total >= 1 else 0
        if bits < FEWEST_BITS:
            raise PrefedError(
                f"weights that may add up to {total} leave {bits} bits for a number; take smaller "
                f'weights, weighting = "uniform", or a smaller largest_count'
            )
        return FixedPoint(self.sizes, exponents, bits)

    def encode(self, form: FixedPoint, values: State, loss: float, weight: int) -> Integers | None:
        """The vector of one client; None if there is a number that is not finite."""
        parts: list[NDArray[np.floating]] = [np.array([loss])]
        for name, value in list(self.values.items())[1:]:
            parts.append(values[name].detach().reshape(-1).cpu().numpy())
            assert len(parts[-1]) == sum(value.sizes), name
        if not all(np.isfinite(part).all() for part in parts):
            return None
        flat = np.concatenate(parts, dtype=np.float64)
        integers, clipped = form.encode(flat)
        del flat
        integers *= weight
        return np.concatenate([np.array([weight, clipped], np.int64), integers])

    def decode(self, form: FixedPoint, total: Integers, weights: int) -> tuple[State, float, int]:
        """Mean values, mean loss, and how many numbers were cut off.

        weights   what the weights add up to, if that is known, or else the most that is believed
        """
        weight, clipped = int(total[0]), int(total[1])
        if not 1 <= weight <= weights or clipped < 0 or not form.fits(total[HEAD:], weight):
            raise Wrong("numbers that no sum of honest nodes has")
        flat = torch.from_numpy(form.decode(total[HEAD:], weight))
        split = flat.split([sum(value.sizes) for value in self.values.values()])
        means = {
            name: part.reshape(value.like.shape).to(value.like.dtype)
            for (name, value), part in zip(self.values.items(), split, strict=True)
        }
        return means, float(means.pop(LOSS)), clipped

    def bytes_of(self, names: Collection[str]) -> int:
        """What these values take up in a vector."""
        return 8 * sum(sum(v.sizes) for name, v in self.values.items() if name in names)


def _exponent(name: str, largest: float) -> int:
    if name in (LOSS, LOCAL_STEPS):
        return LOSSES if name == LOSS else STEPS
    grown = math.frexp(largest)[1]  # the power of two above it
    if name == "weights":  # the server's own are weights, what comes is their change
        return min(max(CHANGE, grown + 3), HIGHEST)
    return min(max(grown + ROOM, LOWEST), HIGHEST) if largest else UNKNOWN


def whole_weight(weight: float) -> int:
    if weight != int(weight) or weight < 1:
        raise PrefedError(
            f"weighting: {weight:g} is not a whole number, which secure aggregation needs; "
            f"multiply your weights so that all are"
        )
    return int(weight)
