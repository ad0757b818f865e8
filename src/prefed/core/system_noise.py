"""Random numbers that nobody can foretell or repeat: from the system's own randomness."""

import os
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def uniform(count: int) -> Numbers:
    """Numbers between 0 and 1, neither of them, from the system's randomness: 53 bits each."""
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(count: int) -> Numbers:
    """Standard normal numbers from the system's randomness (Box and Muller)."""
    half = -(-count // 2)
    radius, angle = np.sqrt(-2 * np.log(uniform(half))), 2 * np.pi * uniform(half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
