"""Secure aggregation worked out again, from the papers and the standards and not from our source.

Fixed point in fractions (no rounding but the one that is meant), HKDF from RFC 5869 with `hmac`,
AES in counter mode by PyCryptodome in place of `cryptography`, sums in Python's integers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from Crypto.Cipher import AES
from Crypto.Util import Counter

MODULUS = 2**64


def to_integer(value: float, exponent: int, bits: int) -> tuple[int, bool]:
    """The nearest multiple of 2^(exponent-bits), as how many times it is; and whether it was cut
    off at the bound. Python rounds half to even."""
    scaled = round(Fraction(value) * Fraction(2) ** (bits - exponent))
    return max(-(2**bits), min(2**bits, scaled)), abs(scaled) > 2**bits


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> Fraction:
    total = sum((Fraction(v) * w for v, w in zip(values, weights, strict=True)), Fraction(0))
    return total / sum(weights)


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, no salt, 32 bytes: extract, then one block of expand."""
    key = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(key, info + b"\x01", hashlib.sha256).digest()


def mask(secret: bytes, purpose: bytes, length: int, first: int = 0) -> list[int]:
    """The key stream in words of 64 bits, the lowest byte first; from the word `first` on."""
    counter = Counter.new(128, initial_value=0)
    cipher = AES.new(hkdf(secret, b"prefed mask " + purpose), AES.MODE_CTR, counter=counter)
    stream = cipher.encrypt(bytes(8 * length))
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(first, length)]


def masked(
    vector: Sequence[int], own: int, private: bytes, pairs: dict[int, bytes], told: bytes,
    session: bytes,
) -> list[int]:  # fmt: skip
    """Bonawitz et al. 2017, figure 4, round 2: y_u = x_u + p_u + sum over v of p_uv."""
    of_one = b"of one " + session + own.to_bytes(8, "big")
    found = [x + p for x, p in zip(vector, mask(private, of_one, len(vector)), strict=True)]
    for other, secret in pairs.items():
        low, high = min(own, other), max(own, other)
        purpose = b"of two " + session + told + low.to_bytes(8, "big") + high.to_bytes(8, "big")
        sign = 1 if own > other else -1
        pair = mask(secret, purpose, len(vector))
        found = [x + sign * p for x, p in zip(found, pair, strict=True)]
    return [x % MODULUS for x in found]


def with_sign(words: Sequence[int]) -> np.ndarray:
    """Sums that may be negative, from integers modulo 2^64."""
    return np.array([w - MODULUS if w >= MODULUS // 2 else w for w in words], dtype=object)
