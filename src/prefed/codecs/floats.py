"""Shorter floating-point numbers, rounded at random so that the mean is kept.

A number between two neighbours goes to the nearer with the greater probability, in such
proportion that its expectation is the number itself (up to the 16 bits of the draw).
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefed.codecs.base import (
    CODECS,
    HUGE,
    TINY,
    Codec,
    Form,
    Noise,
    Parts,
    blocks,
    count,
    flat,
    uniform,
    vector,
)
from prefed.layout import Layout

BLOCK = 256


@CODECS.register("float32")
class Float32(Codec):
    """Rounded to the nearest float32; for weights of this type nothing is lost."""

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"values": (torch.float32, (layout.size,))}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        return {"values": vector(x)}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        return parts["values"].to(like.dtype)


@CODECS.register("bfloat16")
class BFloat16(Codec):
    """bfloat16, unbiased. The error is at most 2^-7 of the value: 7 bits behind the point.

    Numbers beyond the largest bfloat16 become the largest.
    """

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"values": (torch.bfloat16, (layout.size,))}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        # The upper half of a float32 is a bfloat16: noise below it, added to the magnitude,
        # carries into it with the right probability. The last one before infinity must not.
        bits = vector(x).contiguous().view(torch.int32)
        low = noise(layout.size).to(bits.device, torch.int32).bitwise_and_(0xFFFF)
        low *= bits.bitwise_and(0x7FFFFFFF) < 0x7F7F0000
        return {"values": low.add_(bits).bitwise_right_shift_(16).short().view(torch.bfloat16)}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        return parts["values"].to(like.dtype)


@CODECS.register("float16")
class Float16(Codec):
    """float16, unbiased. The error is at most 2^-10 of the value, or 2^-24 if that is more.

    Numbers beyond 65504 become 65504, so this is for changes of weights and not for P.
    """

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"values": (torch.float16, (layout.size,))}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        return {"values": rounded(vector(x), noise(layout.size), torch.float16, 10, -14)}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        return parts["values"].to(like.dtype)


@CODECS.register("float8")
class Float8(Codec):
    """8 bits (E4M3) in units of the largest magnitude in each block of 256, unbiased.

    The error is at most 2^-3 of the value, or 2^-9 / 448 of the block's largest if that is more.
    """

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {
            "values": (torch.float8_e4m3fn, (layout.size,)),
            "scale": (torch.float32, (count(layout, BLOCK),)),
        }

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        rows = blocks(vector(x), BLOCK)
        scale = rows.abs().amax(-1).div_(448).clamp_(min=TINY)
        units = flat(rows / scale.unsqueeze(-1), layout)
        short = rounded(units, noise(layout.size), torch.float8_e4m3fn, 3, -6)
        return {"values": short, "scale": scale}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        rows = blocks(parts["values"].to(torch.float32), BLOCK)
        return flat((rows * parts["scale"].unsqueeze(-1)).clamp_(-HUGE, HUGE), layout).to(
            like.dtype
        )


def rounded(x: Tensor, noise: Tensor, dtype: torch.dtype, digits: int, smallest: int) -> Tensor:
    """Rounded at random to a type with so many binary digits behind the point and normal numbers
    from 2^smallest on."""
    exponent = x.contiguous().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    exponent = exponent.clamp_(min=smallest + 127).sub_(digits).bitwise_left_shift_(23)
    step = exponent.view(torch.float32)
    most = torch.finfo(dtype).max
    u = uniform(noise.to(x.device))
    near = torch.floor(x / step + u).mul_(step).clamp_(-most, most)
    return torch.where(x.isfinite(), near, x).to(dtype)
