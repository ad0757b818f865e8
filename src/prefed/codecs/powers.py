"""Logarithms and powers of two whose bits are the same on every machine.

Those of torch differ from one processor to another, so that a codec would send other bytes. Here
they are sums and products that are rounded one by one, in torch and, with the same bits, in C.
"""

import math

import torch
from torch import Tensor

HALF_ROOT = 0x3F3504F3
"""The bits of sqrt(1/2)."""


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


LOG2 = [_float32(2 / (math.log(2) * k)) for k in (7, 5, 3, 1)]
"""Of s, s^3, s^5, s^7 in log2((1 + s) / (1 - s)), last first: the next is less than 4e-8."""
EXP2 = [_float32(math.log(2) ** k / math.factorial(k)) for k in range(7, -1, -1)]
"""Taylor's, last first: on [-1/2, 1/2] the next is less than 1e-8."""


def log2(x: Tensor) -> Tensor:
    """Of float32, positive and not below 2^-126."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits - HALF_ROOT).bitwise_right_shift_(23)
    part = (bits - exponent.bitwise_left_shift(23)).view(torch.float32)  # sqrt(1/2) to sqrt(2)
    s = (part - 1).div_(part.add_(1))
    return _polynomial(LOG2, s * s).mul_(s).add_(exponent.to(torch.float32))


def exp2(x: Tensor) -> Tensor:
    """Of float32, from -125 to below 128.5; NaN stays."""
    whole = (x + 0.5).floor_()
    power = whole.to(torch.int32).add_(126).bitwise_left_shift_(23).view(torch.float32)
    return _polynomial(EXP2, x - whole).mul_(power).mul_(2)  # 2^128 is none


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    found = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        found.add_(coefficient).mul_(x)
    return found.add_(coefficients[-1])


def _horner(coefficients: list[float]) -> str:
    found = f"{coefficients[0]!r}f * x"
    for coefficient in coefficients[1:-1]:
        found = f"({found} + {coefficient!r}f) * x"
    return f"{found} + {coefficients[-1]!r}f"


IN_C = f"""
static inline float log2_series(float x) {{ return {_horner(LOG2)}; }}
static inline float exp2_series(float x) {{ return {_horner(EXP2)}; }}
static inline float log2_(float x)
{{
    const int32_t bits = bits_of(x), exponent = (bits - {HALF_ROOT}) >> 23;
    const float part = of_bits(bits - exponent * (1 << 23)), s = (part - 1) / (part + 1);
    return log2_series(s * s) * s + (float)exponent;
}}
static inline float exp2_(float x)
{{
    const float whole = floorf(x + 0.5f);
    return exp2_series(x - whole) * of_bits(((int32_t)whole + 126) * (1 << 23)) * 2;
}}
"""
"""Both, as log2_ and exp2_."""
