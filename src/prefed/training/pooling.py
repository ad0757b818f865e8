"""Max-pooling in less time on a CPU, with the bits of torch's own.

ReLU may stand before max-pooling or behind it: the largest number of a window is the same before
and after, the first of equal ones too, and windows without a positive number have no gradient.
Behind it, ReLU has a quarter of the work. `pool_before_relu` has the two change places where they
are neighbours in an nn.Sequential.

`FastPooling` is entered around a forward pass and catches max-pooling wherever the model calls it:

- Behind a ReLU, what is pooled is the input of the ReLU, and the ReLU is taken of the result: the
  one before has been computed, and is left out on the way back.
- Of 2 x 2, with the channels not last. torch looks at each window in turn and notes the place of
  its largest number, with a branch that processors guess wrong. Whole rows of windows are compared
  here at once, and places are worked out for the way back alone.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from prefed.core.hooks import hooked

POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


class PoolsFirst(nn.Sequential):
    """An nn.Sequential whose layers are as they were, and run in another order."""

    __qualname__ = nn.Sequential.__qualname__  # by which a run knows its model
    order: list[int]

    def forward(self, input: Any) -> Any:
        layers = [*self]
        for place in self.order:
            input = layers[place](input)
        return input

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):  # a part of it is as it was written
            return nn.Sequential(OrderedDict([*self._modules.items()][idx]))
        return super().__getitem__(idx)


def pool_before_relu(model: nn.Module) -> None:
    """In every nn.Sequential of the model, unless somebody listens there."""
    for module in model.modules():
        if type(module) is nn.Sequential and (order := _reordered([*module])) != sorted(order):
            module.__class__ = PoolsFirst
            module.order = order  # type: ignore[assignment]


def as_written(model: nn.Module) -> None:
    """Undo `pool_before_relu`."""
    for module in model.modules():
        if type(module) is PoolsFirst:
            del module.order
            module.__class__ = nn.Sequential  # type: ignore[assignment]


def _reordered(layers: list[nn.Module]) -> list[int]:
    """The places of the layers, each max-pooling before the ReLU that it stands behind."""
    order = list(range(len(layers)))
    for place, (relu, pool) in enumerate(pairwise(layers)):
        fits = type(relu) is nn.ReLU and type(pool) in POOLS and not pool.return_indices
        outside = place == 0 and getattr(relu, "inplace", False)  # what it changes is not its own
        if fits and not (outside or hooked(relu) or hooked(pool)):
            order[place : place + 2] = place + 1, place
    return order


WORTH_IT = 1 << 17
"""Numbers from which on it is faster: catching calls costs something, and so does a way back in
Python."""

_POOLS = (functional.max_pool2d, torch.max_pool2d)
_RELUS = (functional.relu, torch.relu, Tensor.relu)
_backward = torch.ops.aten.max_pool2d_with_indices_backward.default


@dataclass(frozen=True)
class _ReLU:
    """A call of ReLU that may be followed by max-pooling."""

    x: Tensor
    y: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "_ReLU | None":
        """None if it was in place, or is not to be differentiated."""
        if y is x or not y.requires_grad or x.device.type != "cpu":
            return None
        return cls(x, y, (x._version, y._version))

    def gave(self, y: Tensor) -> bool:
        """It did, nothing was written since, and nobody waits for the gradient of y."""
        alike = y is self.y and (self.x._version, y._version) == self.versions
        return alike and not y.retains_grad and not y._backward_hooks


class FastPooling(TorchFunctionMode):
    """Within it, max-pooling goes the fast way where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.relu: _ReLU | None = None
        """The last one."""
        self.largest = 0
        """Numbers in the largest input that could go it, worth it or not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _are_packed():
            return func(*args, **kwargs)
        if func in _RELUS:
            y = func(*args, **kwargs)
            self.relu = _ReLU.of(args[0], y) if args else None
            return y
        if func not in _POOLS or not args:
            return func(*args, **kwargs)
        relu, self.relu = self.relu, None
        x, *rest = args
        behind = relu is not None and relu.gave(x)
        by_rows = _by_twos(*args, **kwargs) and _is_plain(x)
        if behind or by_rows:
            self.largest = max(self.largest, x.numel())
        if relu is not None and behind:
            x = relu.x
        pooled = max_pool(x) if by_rows and x.numel() >= WORTH_IT else func(x, *rest, **kwargs)
        return torch.relu_(pooled) if behind else pooled


def _are_packed() -> bool:
    """Somebody keeps what is saved for the way back in another way, as torch.utils.checkpoint does,
    which computes it again, outside of this mode, and expects the same tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def max_pool(x: Tensor) -> Tensor:
    """torch's max_pool2d(x, 2) of x (N, C, H, W), in torch's usual memory format."""
    if not math.isfinite(x.detach().sum()):  # of several NaNs the last counts: torch knows
        return functional.max_pool2d(x, 2)
    pooled: Tensor = _MaxPool.apply(x)  # type: ignore[no-untyped-call]
    return pooled


class _MaxPool(torch.autograd.Function):
    """Maxima and bits throughout: torch.where asks number by number, and guesses wrong as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # Of equal numbers the first counts, in the order in which they are read.
        height, width = (n // 2 * 2 for n in x.shape[2:])
        a, b, c, d = (x[..., i:height:2, j:width:2] for i in (0, 1) for j in (0, 1))
        upper, lower = torch.maximum(a, b), torch.maximum(c, d)
        if ctx.needs_input_grad[0]:
            down, right = lower > upper, b > a
            right ^= (d > c).bitwise_xor_(right).bitwise_and_(down)  # of the row that is taken
            ctx.save_for_backward(x, down, right)
        return torch.maximum(upper, lower, out=upper)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, down, right = ctx.saved_tensors
        height, width = x.shape[2:]
        bits = torch.uint8 if width < 128 else torch.int32
        inside = torch.add(right.to(bits), down.to(bits), alpha=width)
        places = inside.long().add_(_corners(height, width))
        two, zero, one = [2, 2], [0, 0], [1, 1]
        found: Tensor = _backward(gradient, x, two, two, zero, one, False, places)
        return found


@cache
def _corners(height: int, width: int) -> Tensor:
    """Where each window of an image begins."""
    rows = torch.arange(0, height // 2 * 2, 2).unsqueeze(1) * width
    return rows + torch.arange(0, width // 2 * 2, 2)


def _by_twos(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Windows of 2 x 2 that lie side by side."""
    pairs = [v if isinstance(v, int) else tuple(v) for v in (kernel_size, stride or kernel_size)]
    rest = [v if isinstance(v, int) else tuple(v) for v in (padding, dilation)]
    fits = all(pair in (2, (2, 2)) for pair in pairs)
    return fits and rest[0] in (0, (0, 0)) and rest[1] in (1, (1, 1)) and not (
        ceil_mode or return_indices)  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Images on a CPU, in torch's usual memory format and no other."""
    return (
        x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and min(x.shape[1:]) > 1
        and x.is_contiguous()
        and not x.is_contiguous(memory_format=torch.channels_last)
    )
