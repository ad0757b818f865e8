"""8 or 4 bits on a logarithmic scale, for P: what counts there is the ratio."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from prefed.codecs.interface import CODECS, Blockwise, Parts, blocks, unblock, vector
from prefed.codecs.powers import IN_C, exp2, log2

FLOOR = 2.0**-100
"""The lowest level: a level's value divided by the ratio of two must still be a normal float32."""
SLACK = 2e-5
"""Octaves: more than the rounding errors of a float32 logarithm."""


class Logarithmic(Blockwise):
    """Levels in equal ratios from the smallest positive to the largest value of each block of 512.

    Code 0 is the number zero and nothing else: a positive value stays positive. The levels reach
    `span` octaves below the largest value (and not below 2^-100): a positive value that is smaller
    is sent as the lowest level, so that a single one does not draw the others' levels apart. All
    others are rounded at random between two levels, unbiased (up to SLACK); the error is at most
    (largest / smallest)^(1 / (levels - 1)) - 1 of the value, and so at most 2^(span / (levels - 1))
    - 1. A block with a value that is negative or not finite comes out as NaN.

    Written without comparisons and `where`, which take longer than the logarithm.
    """

    signed = False
    block = 512
    levels: ClassVar[int]
    span: ClassVar[int]

    @abstractmethod
    def packed(self, size: int) -> tuple[torch.dtype, int]:
        """The type and number of packed codes."""

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """Whole numbers from 0 to `levels`, as float32 (C, d), in as few bytes as they need."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> Tensor: ...

    def prepare(self, x: Tensor) -> Tensor:
        # A positive float64 may be zero as a float32.
        return x if x.dtype == torch.float32 else vector(torch.where(x > 0, x.clamp(FLOOR), x))

    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        rows = blocks(x, self.block)
        smallest, high = _range(rows)
        low = torch.maximum(smallest, (high * 2.0**-self.span).clamp_(min=FLOOR))
        low, high = torch.where(high > 0, low, 0.0), torch.where(high > 0, high.clamp(FLOOR), high)
        if bool((smallest < low).any()):
            rows = torch.maximum(rows, rows.sign().mul_(low.unsqueeze(-1)))
        first, step = _scale(low, high, self.levels)
        # Between the levels a and r*a, the upper one must have the probability (x/a - 1)/(r - 1),
        # which is that of x > a*(1 + u*(r - 1)) for a uniform u: divide, and round down.
        more = exp2(step) - 1
        u = blocks(noise, self.block).to(torch.float32)
        divisor = u.mul_(more / 65536).add_(1 + more * (32768.5 / 65536))
        # Zero takes the place of a number three levels below the first, and so ends below code 1.
        below = exp2(first - 3 * step)
        place = log2(torch.maximum(rows, below).div_(divisor))
        place.sub_(first - 2 * step - SLACK).mul_(1 / step).clamp_(0, self.levels).floor_()
        codes = self.pack(unblock(place.nan_to_num_(0.0), x.shape[1]))
        return {"codes": codes, "low": low, "high": high}

    def decode_piece(self, parts: Parts, size: int) -> Tensor:
        codes = blocks(self.unpack(parts["codes"])[:, :size], self.block)
        first, step = _scale(parts["low"], parts["high"], self.levels)
        values = exp2((codes * step).add_(first - step))
        torch.minimum(values, parts["high"].unsqueeze(-1), out=values)
        return unblock(values.mul_(codes.clamp_(max=1)), size)

    def in_c(self) -> str:
        return f"""
{IN_C}
static void block(float *restrict x, const int16_t *restrict noise)
{{
    const float levels = {self.levels}, least = {FLOOR!r}f, slack = {SLACK!r}f;
    int32_t smallest = 0x7fffffff; /* the smallest positive, less one; zero less one is largest */
    for (int i = 0; i < BLOCK; i++) {{
        const int32_t own = (int32_t)((uint32_t)bits_of(x[i]) - 1u) & 0x7fffffff;
        smallest = own < smallest ? own : smallest;
    }}
    float high = x[0], lowest = x[0], rest = 0;
    for (int i = 0; i < BLOCK; i++) {{
        high = x[i] > high ? x[i] : high;
        lowest = x[i] < lowest ? x[i] : lowest;
        rest += x[i] - x[i]; /* zero, or NaN */
    }}
    if (rest != 0 || lowest < 0) {{
        fill(x, BLOCK, NAN);
        return;
    }}
    if (high == 0) {{
        fill(x, BLOCK, 0);
        return;
    }}
    const float first_of = of_bits(smallest + 1), span = high * {2.0**-self.span!r}f;
    const float bottom = span < least ? least : span;
    const float low = first_of < bottom ? bottom : first_of, top = high < least ? least : high;
    const float first = log2_(low < least ? least : low), last = log2_(top);
    float step = (last - first) / (levels - 1);
    step = step < slack ? slack : step;
    const float more = exp2_(step) - 1, share = more / 65536;
    const float rise = 1 + more * {32768.5 / 65536!r}f, below = exp2_(first - 3 * step);
    const float start = first - 2 * step - slack, base = first - step, over = 1 / step;
    for (int i = 0; i < BLOCK; i++) {{
        const float least_of = x[i] > 0 ? low : 0, own = x[i] < least_of ? least_of : x[i];
        const float place = log2_((own < below ? below : own) / ((float)noise[i] * share + rise));
        const float code = floorf(clamp((place - start) * over, 0, levels));
        const float value = exp2_(code * step + base);
        x[i] = (value > top ? top : value) * (code > 1 ? 1 : code);
    }}
}}
"""

    def lengths(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        scale = (torch.float32, -(-size // self.block))
        return {"codes": self.packed(size), "low": scale, "high": scale}


def _range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest positive and the largest value of each block; zeros if all are zero, and a NaN
    for the largest if a value is negative or not finite."""
    # Numbers are ordered as their bits are, and zero less one is the largest of all.
    bits = rows.contiguous().view(torch.int32).sub(1).bitwise_and_(0x7FFFFFFF).amin(-1)
    low, high = bits.add_(1).view(torch.float32), rows.amax(-1)
    high = torch.where(high.isfinite() & (rows.amin(-1) >= 0), high, torch.nan)
    return torch.where(high > 0, low, 0.0), high


def _scale(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The logarithm of the first level, and the octaves from one level to the next."""
    first, last = log2(low.clamp(min=FLOOR)), log2(high.clamp(min=FLOOR)).add_(high - high)
    step = ((last - first) / (levels - 1)).clamp(min=SLACK)
    return first.unsqueeze(-1), step.unsqueeze(-1)


@CODECS.register("log8")
class Log8(Logarithmic):
    """For P: 255 levels in equal ratios, a byte each; unbiased, and positive stays positive.

    Levels go from the smallest positive value of each block of 512 to the largest, over at most 64
    octaves (then the error is 19 % of the value); what is smaller is sent as the lowest level.
    """

    levels, span = 255, 64

    def packed(self, size: int) -> tuple[torch.dtype, int]:
        return torch.int8, size

    def pack(self, codes: Tensor) -> Tensor:
        return codes.sub(128).to(torch.int8)  # many times faster than a conversion to uint8

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.to(torch.float32).add_(128)


@CODECS.register("log4")
class Log4(Logarithmic):
    """For P: 15 levels in equal ratios, two to a byte, over at most 28 octaves (then a ratio of 4);
    otherwise as log8."""

    levels, span = 15, 28

    def packed(self, size: int) -> tuple[torch.dtype, int]:
        return torch.uint8, -(-size // 2)

    def pack(self, codes: Tensor) -> Tensor:
        pairs = blocks(codes.to(torch.int8).view(torch.uint8), 2)
        return pairs[..., 0] | pairs[..., 1] << 4

    def unpack(self, packed: Tensor) -> Tensor:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.float32)
