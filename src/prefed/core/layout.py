"""A model as flat vectors.

The parameters of a model become views into one vector, its gradients views into another, so a
step of an optimiser is a few passes over memory with no loop over parameters. Strides are kept:
a channels_last convolution stays channels_last inside the vector.

Buffers (BatchNorm statistics, counters) form a second vector. It is averaged over clients and
never preconditioned; counters travel as numbers of the weights' type and are rounded on arrival.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prefed.core.errors import PrefedError


def strided(rows: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor inside a vector (d), or one inside each row of (C, d), sharing its memory: one call
    where slicing and reshaping take two."""
    return rows.as_strided(
        (*rows.shape[:-1], *shape),
        (*rows.stride()[:-1], *stride),
        rows.storage_offset() + offset,
    )


@functools.cache
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Entry:
    """Where one named tensor lies inside a flat vector."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, rows: Tensor) -> Tensor:
        """This tensor inside a vector (d), or inside each row of (C, d), sharing its memory."""
        return strided(rows, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies inside a flat vector."""

    entries: tuple[Entry, ...]
    size: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> "Layout":
        entries, offset = [], 0
        for name, tensor in tensors:
            dense = torch.empty_like(tensor, memory_format=torch.preserve_format)
            entries.append(Entry(name, tuple(tensor.shape), dense.stride(), offset))
            offset += tensor.numel()
        return cls(tuple(entries), offset)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """All named tensors inside a vector (d), or inside each row of (C, d)."""
        return {entry.name: entry.view(rows) for entry in self.entries}


class FlatModel:
    """A module whose trainable parameters and gradients live in two flat vectors.

    The module is changed in place: hand in a copy if it is not yours.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise PrefedError("model: it has no trainable parameters")
        dtypes = sorted({str(p.dtype) for _, p in parameters})
        if len(dtypes) > 1 or not parameters[0][1].dtype.is_floating_point:
            raise PrefedError(
                f"model: all trainable parameters must share one floating-point dtype, "
                f"found {', '.join(dtypes)}; convert it with model.float() or model.double()"
            )
        self.module = module
        self.layout = Layout.of(parameters)
        first = parameters[0][1]
        self.weights = torch.empty(self.layout.size, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.weights)
        weights, gradients = self.layout.views(self.weights), self.layout.views(self.gradient)
        for name, parameter in parameters:
            weights[name].copy_(parameter.detach())
            parameter.data = weights[name]
            parameter.grad = gradients[name]
        self._buffers = [b for _, b in module.named_buffers()]
        self.buffer_layout = Layout.of((n, b.contiguous()) for n, b in module.named_buffers())

    def read_buffers(self) -> Tensor:
        """A new vector with all buffers."""
        if not self._buffers:
            return self.weights.new_empty(0)
        return torch.cat([b.detach().reshape(-1).to(self.weights.dtype) for b in self._buffers])

    def write_buffers(self, vector: Tensor) -> None:
        for buffer, entry in zip(self._buffers, self.buffer_layout.entries, strict=True):
            part = vector[entry.offset : entry.offset + buffer.numel()].view(entry.shape)
            buffer.copy_(part if buffer.dtype.is_floating_point else part.round())
