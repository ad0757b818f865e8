"""Dropout whose masks come from a key instead of from a generator.

A generator hands out numbers in the order in which they are asked for, so masks would depend on
how many clients train at a time and in which thread. Here the mask is a hash of (key, number of
the dropout call in this forward pass, number of the element): the same for a client and a step in
every engine, on any number of workers, and on any device.

`KeyedDropout` is entered around a forward pass and catches dropout wherever the model calls it, as
a module or as a function. The hash is plain integer arithmetic, so it runs under vmap as well, with
a key of its own for each client.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_WHOLE_FEATURES: dict[Callable[..., Any], bool] = {
    functional.dropout: False,
    torch.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
}
"""What is caught, and whether it drops whole channels."""


def keys(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Keys (n, 2) from 64-bit seeds."""
    words = np.array(seeds, dtype=np.int64).view(np.int32).reshape(-1, 2)
    return torch.from_numpy(words.copy()).to(device)


def dropout(x: Tensor, p: float, key: Tensor, call: int, whole_features: bool = False) -> Tensor:
    """Dropout of `x` by its key (2), or of rows x (C, ...) each by its own of keys (C, 2)."""
    rows = key.dim() - 1
    shape = list(x.shape[rows:])
    if whole_features:
        shape[2:] = [1] * len(shape[2:])
    first, second = key[..., :1], key[..., 1:]
    number = torch.arange(prod(shape), dtype=torch.int32, device=x.device)
    bits = _mix(_mix(number ^ _mix(first + call)) + second) & 0x7FFFFFFF
    keep = bits >= min(int(p * 2**31), 2**31 - 1)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return x * keep.reshape(*x.shape[:rows], *shape).to(x.dtype).mul_(scale)


def _mix(bits: Tensor) -> Tensor:
    """Wellons' lowbias32: every bit of the result depends on every bit of the argument. Shifts of
    signed numbers bring copies of the sign in, which the masks take away."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return bits ^ ((bits >> 16) & 0xFFFF)


class KeyedDropout(TorchFunctionMode):
    """Within it, each call of dropout is answered with the key; `calls` counts them."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.calls = key, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole_features = _WHOLE_FEATURES.get(func)
        if whole_features is None:
            return func(*args, **(kwargs or {}))
        x, p, training = _arguments(*args, **(kwargs or {}))
        if not training or p == 0:
            return x
        self.calls += 1
        return dropout(x, p, self.key, self.calls, whole_features)


def _arguments(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> tuple[Tensor, float, bool]:
    """The arguments as F.dropout names them; torch.dropout says `train`. In place or not makes
    no difference to what the model computes next."""
    return input, p, training if train is None else train
