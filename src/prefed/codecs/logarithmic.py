"""8 or 4 bits on a logarithmic scale, for P: what counts there is the ratio."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from prefed.codecs.base import (
    CODECS,
    TINY,
    Codec,
    Form,
    Noise,
    Parts,
    blocks,
    count,
    flat,
    vector,
)
from prefed.layout import Layout

BLOCK = 512
FINEST = 1e-6
"""Octaves between two levels, at least: float32 does not tell closer ones apart."""


class Logarithmic(Codec):
    """Levels in equal ratios from the smallest positive to the largest value of each block of 512.

    Code 0 is the number zero and nothing else: a positive value stays positive. Rounded at random
    between two levels and unbiased; the error is at most (largest / smallest)^(1 / (levels - 1))
    - 1 of the value. Positive values below 1.2e-38 are sent as 1.2e-38. A block with a value that
    is negative or not finite comes out as NaN.
    """

    signed = False
    levels: ClassVar[int]

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        rows = blocks(vector(x), BLOCK)
        low, high = rows.aminmax(dim=-1)
        zeros = not bool((low > 0).all())
        high = torch.where(high.isfinite() & (low >= 0), high, torch.nan)  # NaN also if negative
        if zeros:
            low = torch.where(rows > 0, rows, torch.inf).amin(-1)
            low = torch.where(high > 0, low, 0.0)  # a block without a positive value: both zero
        low, high = (torch.where(v > 0, v.clamp(min=TINY), v) for v in (low, high))

        # Between the levels a and r*a, the upper one must have the probability (x/a - 1)/(r - 1),
        # which is that of x > a*(1 + u*(r - 1)) for a uniform u: divide, and round down.
        first, step = _scale(low, high, self.levels)
        above = step.mul(math.log(2)).expm1_()
        bits = blocks(noise(layout.size).to(x.device), BLOCK).to(torch.float32)
        divisor = torch.addcmul(1 + above * 0.5, bits.add_(0.5), above / 65536, out=bits)
        place = torch.div(rows, divisor, out=bits).log2_().sub_(first - step).div_(step)
        codes = place.clamp_(0, self.levels - 1).nan_to_num_(0.0).to(torch.uint8).add_(1)
        if zeros:
            codes.mul_(rows > 0)
        return {"codes": flat(codes, layout), "low": low, "high": high}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        codes = blocks(parts["codes"], BLOCK)
        low, high = parts["low"].unsqueeze(-1), parts["high"].unsqueeze(-1)
        first, step = _scale(parts["low"], parts["high"], self.levels)
        values = codes.to(torch.float32).mul_(step).add_(first - step).exp2_().clamp_(low, high)
        if not bool(codes.all()):
            values = torch.where(codes > 0, values, high * 0)
        return flat(values, layout).to(like.dtype)

    def scales(self, layout: Layout) -> Form:
        part = (torch.float32, (count(layout, BLOCK),))
        return {"low": part, "high": part}


def _scale(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The logarithm of the first level, and the octaves from one level to the next."""
    first, last = low.clamp(min=TINY).log2(), high.clamp(min=TINY).log2()
    step = ((last - first) / (levels - 1)).clamp(min=FINEST)
    return first.unsqueeze(-1), step.unsqueeze(-1)


@CODECS.register("log8")
class Log8(Logarithmic):
    """255 levels, a byte each; unbiased. See Logarithmic."""

    levels = 255

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"codes": (torch.uint8, (layout.size,))} | self.scales(layout)


@CODECS.register("log4")
class Log4(Logarithmic):
    """15 levels, two to a byte; unbiased. See Logarithmic."""

    levels = 15

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"codes": (torch.uint8, (-(-layout.size // 2),))} | self.scales(layout)

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        parts = super().encode(x, layout, noise)
        pairs = blocks(parts["codes"], 2)
        return parts | {"codes": pairs[..., 0] | pairs[..., 1] << 4}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        packed = parts["codes"]
        codes = flat(torch.stack([packed & 15, packed >> 4], -1), layout)
        return super().decode(parts | {"codes": codes}, layout, like)
