"""Shorter floating-point numbers, rounded at random so that the mean is kept.

A number between two neighbours goes to the nearer with the greater probability, in such
proportion that its expectation is the number itself (up to the 16 bits of the draw). Numbers
that are not finite become NaN.
"""

import torch
from torch import Tensor

from prefed.codecs.interface import (
    CODECS,
    HUGE,
    TINY,
    Blockwise,
    Codec,
    Form,
    Noise,
    Parts,
    blocks,
    unblock,
    uniform,
    vector,
)
from prefed.core.layout import Layout


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
class BFloat16(Blockwise):
    """bfloat16, unbiased. The error is less than 2^-7 of the value: 7 bits behind the point.

    Numbers beyond the largest bfloat16 become the largest.
    """

    def lengths(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"halves": (torch.int16, size)}

    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        # The upper half of a float32 is a bfloat16: noise below it, added to the magnitude,
        # carries into it with the right probability.
        most = torch.finfo(torch.bfloat16).max
        bits = x.clamp(-most, most).add_(x - x).view(torch.int32)  # x - x is zero, or NaN
        low = noise.to(torch.int32).bitwise_and_(0xFFFF)
        return {"halves": low.add_(bits).bitwise_right_shift_(16).to(torch.int16)}

    def decode_piece(self, parts: Parts, size: int) -> Tensor:
        return parts["halves"].view(torch.bfloat16)

    def in_c(self) -> str:
        return """
static void block(float *restrict x, const int16_t *restrict noise)
{
    const float most = 0x1.fep127f;
    for (int i = 0; i < BLOCK; i++) {
        const float own = clamp(x[i], -most, most) + (x[i] - x[i]);
        const uint32_t sum = (uint32_t)bits_of(own) + (uint16_t)noise[i];
        x[i] = of_bits((int32_t)(sum & 0xffff0000u));
    }
}
"""


@CODECS.register("float16")
class Float16(Blockwise):
    """float16, unbiased. The error is less than 2^-10 of the value, or 2^-24 if that is more.

    Numbers beyond 65504 become 65504, so this is for changes of weights and not for P.
    """

    def lengths(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"values": (torch.float16, size)}

    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        return {"values": rounded(x, noise, torch.float16, 10, -14)}

    def decode_piece(self, parts: Parts, size: int) -> Tensor:
        return parts["values"]

    def in_c(self) -> str:
        return (
            ROUNDED
            + """
static void block(float *restrict x, const int16_t *restrict noise)
{
    for (int i = 0; i < BLOCK; i++) x[i] = rounded(x[i], noise[i], 65504, 10, -14);
}
"""
        )


@CODECS.register("float8")
class Float8(Blockwise):
    """8 bits (E4M3) in units of the largest magnitude in each block of 256, unbiased.

    The error is less than 2^-3 of the value, or 2^-9 / 448 of the block's largest if that is more
    (or 1.2e-38, if even that is less).
    """

    block = 256

    def lengths(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        return {
            "codes": (torch.uint8, size),
            "scale": (torch.float32, -(-size // self.block)),
        }

    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        rows = blocks(x, self.block)
        scale = rows.abs().amax(-1).div_(448).clamp_(min=TINY)
        units = unblock(rows / scale.unsqueeze(-1), x.shape[1])
        codes = rounded(units, noise, torch.float8_e4m3fn, 3, -6).view(torch.uint8)
        return {"codes": codes, "scale": scale}

    def decode_piece(self, parts: Parts, size: int) -> Tensor:
        values = parts["codes"].view(torch.float8_e4m3fn).to(torch.float32)
        rows = blocks(values, self.block)
        return unblock((rows * parts["scale"].unsqueeze(-1)).clamp_(-HUGE, HUGE), size)

    def in_c(self) -> str:
        return (
            ROUNDED
            + """
static void block(float *restrict x, const int16_t *restrict noise)
{
    for (int half = 0; half < 2; half++, x += 256, noise += 256) {
        float scale = largest(x, 256) / 448;
        scale = scale < TINY ? TINY : scale;
        for (int i = 0; i < 256; i++)
            x[i] = clamp(rounded(x[i] / scale, noise[i], 448, 3, -6) * scale, -HUGE_, HUGE_);
    }
}
"""
        )


def rounded(x: Tensor, noise: Tensor, dtype: torch.dtype, digits: int, smallest: int) -> Tensor:
    """Rounded at random to a type with `digits` binary digits behind the point and normal numbers
    from 2^smallest on."""
    exponent = x.contiguous().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    exponent = exponent.clamp_(min=smallest + 127).sub_(digits).bitwise_left_shift_(23)
    step = exponent.view(torch.float32)
    most = torch.finfo(dtype).max
    near = uniform(noise).add_(x / step).floor_().mul_(step).clamp_(-most, most)
    return near.add_(x - x).to(dtype)  # x - x is zero, or NaN


ROUNDED = """
static inline float rounded(float x, int16_t noise, float most, int digits, int smallest)
{
    int32_t exponent = bits_of(x) >> 23 & 0xff;
    exponent = (exponent < smallest + 127 ? smallest + 127 : exponent) - digits;
    const float step = of_bits(exponent * (1 << 23));
    return clamp(floorf(uniform(noise) + x / step) * step, -most, most) + (x - x);
}
"""
"""The same in C."""
