"""Dropout whose masks come from a key instead of from a generator.

A generator hands out numbers in the order in which they are asked for, so masks would depend on
how many clients train at a time and in which thread. Here the mask is a hash of (key, number of
the dropout call in this forward pass, number of the element): the same for a client and a step in
every engine, on any number of workers, and on any device.

`KeyedDropout` is entered around a forward pass and catches dropout wherever the model calls it, as
a module, as a function or inside scaled_dot_product_attention. The hash is plain integer
arithmetic, so it runs under vmap as well, with a key of its own for each client. (What
nn.MultiheadAttention drops cannot be caught: torch asks nobody inside it.)
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from prefed.core import batch

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
    found: Tensor = batch.moved(torch.from_numpy(words.copy()), device)
    return found


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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    drop: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """torch's scaled_dot_product_attention in its plain lines, with dropout of our own."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop(scores.softmax(-1), dropout_p) @ value


class KeyedDropout(TorchFunctionMode):
    """Within it, each call of dropout is answered with the key; `calls` counts them.

    plain   all attention is computed in plain lines: vmap knows no fused kernel for it
    """

    def __init__(self, key: Tensor, plain: bool = False) -> None:
        super().__init__()
        self.key, self.plain, self.calls = key, plain, 0
        self.attends = False
        """There was a call of scaled_dot_product_attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self.attends = True
            dropped = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            return attention(*args, **kwargs, drop=self.drop) if dropped or self.plain else func(
                *args, **kwargs)  # fmt: skip
        whole_features = _WHOLE_FEATURES.get(func)
        if whole_features is None:
            return func(*args, **kwargs)
        x, p, training, inplace = _arguments(*args, **kwargs)
        found = self.drop(x, p, whole_features) if training else x
        if not inplace or found is x or _kept_by_relu(x):
            return found
        return x.copy_(found)

    def drop(self, x: Tensor, p: float, whole_features: bool = False) -> Tensor:
        if p == 0:
            return x
        self.calls += 1
        return dropout(x, p, self.key, self.calls, whole_features)


def _kept_by_relu(x: Tensor) -> bool:
    """ReLU needs what it gave on the way back, which nobody may write over. It stands right before
    a dropout in place where max-pooling has been moved before it (pooling.py): torch has the
    pooling there, and trains."""
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.grad_fn is not None and x.grad_fn.name().startswith("Relu")


def _arguments(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> tuple[Tensor, float, bool, bool]:
    """The arguments as F.dropout names them; torch.dropout says `train`."""
    return input, p, training if train is None else train, inplace
