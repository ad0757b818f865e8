"""Large vectors: checks that read them once, and memory that is used again.

Memory that is fresh from the system costs several times as much as the arithmetic on it: each page
has to be found and cleared.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

SMALL = 1 << 18
"""Numbers in a tensor that is not worth keeping: the allocator has such memory at hand."""


def all_finite(values: Tensor) -> bool:
    """Whether none of them is NaN or infinite. A sum is as fast as memory, and finite only if all
    of them are; finite numbers with an infinite sum are looked at one by one."""
    if not values.dtype.is_floating_point or bool(values.sum().isfinite()):
        return True
    return bool(values.isfinite().all())


class Memory:
    """Tensors that nobody needs any more, for the next that are as large."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Tensor]] = {}
        self._out: Counter[tuple[object, ...]] = Counter()
        """How many of each kind are with others."""

    def copy(self, value: Tensor, weight: float = 1.0) -> Tensor:
        """The value, or a multiple of it, in memory of its own."""
        if value.numel() < SMALL:
            return value.clone() if weight == 1 else value * weight
        free = self._free.get(_kind(value))
        self._out[_kind(value)] += 1
        into = (
            free.pop() if free else torch.empty_like(value, memory_format=torch.contiguous_format)
        )
        return into.copy_(value) if weight == 1 else torch.mul(value, weight, out=into)

    def give(self, values: Iterable[Tensor]) -> None:
        """Take these back, or others for them: never more than there are out."""
        for value in values:
            if value.numel() >= SMALL and self._out[_kind(value)] > 0:
                self._out[_kind(value)] -= 1
                self._free.setdefault(_kind(value), []).append(value)


def _kind(value: Tensor) -> tuple[object, ...]:
    return value.shape, value.dtype, value.device
