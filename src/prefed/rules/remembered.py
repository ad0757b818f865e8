"""What follows from state that all clients of a round have in common: worked out once a round and
thread, whoever asks."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
_local = threading.local()


def remembered(rule: object, given: Sequence[Tensor], work: Callable[[], T]) -> T:
    """What `work` makes of these tensors for this rule, unless it is what was asked for last."""
    known = _local.__dict__.get("newest")
    if known is None or known[0] != rule or not _same(known[1], given):
        known = _local.newest = rule, [tensor.clone() for tensor in given], work()
    found: T = known[2]
    return found


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        (a.dtype, a.device) == (b.dtype, b.device) and a.equal(b)
        for a, b in zip(one, other, strict=True)
    )
