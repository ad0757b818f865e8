"""Numbers as integers, so that sums modulo 2^64 are exact.

Vectors come in blocks, each with a public bound 2^e that the server names before the round. With b
bits a number is a multiple of the step 2^(e-b), rounded to the nearest (half to even); beyond the
bound it is cut off and counted. b is as large as the sum of all weights allows, so that no sum can
leave the range: nothing ever wraps around.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RANGE = 62
"""Sums stay within 2^62 on both sides of zero."""
FEWEST_BITS = 20
LOWEST, HIGHEST = -500, 500
"""Exponents that a server may name."""


def bits_for(total: int) -> int:
    """The bits of a number, if the weights in a sum add up to `total` at most."""
    return RANGE - (total - 1).bit_length()


@dataclass(frozen=True)
class FixedPoint:
    sizes: Sequence[int]
    """Of the blocks."""
    exponents: Sequence[int]
    """The bound of each block, as a power of two."""
    bits: int

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    def _blocks(self) -> Iterator[tuple[slice, int]]:
        first = 0
        for size, exponent in zip(self.sizes, self.exponents, strict=True):
            yield slice(first, first + size), exponent - self.bits
            first += size

    def steps(self) -> Floats:
        """Of each number: how far two neighbours are apart."""
        found = np.empty(self.size)
        for block, exponent in self._blocks():
            found[block] = math.ldexp(1.0, exponent)
        return found

    def encode(self, values: NDArray[np.floating]) -> tuple[Integers, int]:
        """The integers, and how many numbers had to be cut off."""
        limit, clipped = math.ldexp(1.0, self.bits), 0
        found = np.empty(self.size, np.int64)
        for block, exponent in self._blocks():
            part = values[block].astype(np.float64)
            if np.isnan(part).any():
                raise ValueError("not a number")
            np.ldexp(part, -exponent, out=part)  # exact, as is what follows but for the rounding
            np.rint(part, out=part)
            clipped += int(np.count_nonzero(np.abs(part) > limit))
            found[block] = np.clip(part, -limit, limit, out=part)
        return found, clipped

    def decode(self, total: Integers, weight: int) -> Floats:
        """The mean, from the sum of integers times weights and the sum of these weights."""
        found = np.empty(self.size)
        for block, exponent in self._blocks():
            np.ldexp(total[block] / weight, exponent, out=found[block])
        return found

    def fits(self, total: Integers, weight: int) -> bool:
        """Whether integers of honest nodes can have this sum."""
        limit = weight << self.bits
        low, high = (int(total.min()), int(total.max())) if len(total) else (0, 0)
        return -limit <= low and high <= limit
