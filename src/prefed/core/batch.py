"""What a model is given: one tensor, or several by name or in order; and rows of unequal length.

A batch x is a tensor, a dict of tensors, which the model takes as keywords (input_ids,
attention_mask), or a tuple of tensors, which it takes in order. Whatever is done to samples is done
to each of the tensors, by `mapped`. Rows of unequal length, such as sentences, are held one after
another in a `Ragged` array and padded when a batch goes to the model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from prefed.core.errors import PrefedError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length. What is done with the rows of a tensor can be done with these."""

    values: Tensor
    """Those of all rows, one after another."""
    starts: Tensor
    lengths: Tensor
    """Of each row: where its values begin, and how many there are."""
    fill: float
    """What stands behind the end of a row that is shorter than the longest of its batch."""

    @classmethod
    def of(cls, rows: Sequence[Tensor], fill: float) -> "Ragged":
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = torch.cat([*rows]) if rows else torch.empty(0)
        return cls(values, lengths.cumsum(0) - lengths, lengths, fill)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what `padded` would make of it."""
        width = int(self.lengths.max()) if len(self) else 0
        return (len(self), width, *self.values.shape[1:])

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> "Ragged":
        return Ragged(self.values, self.starts[rows], self.lengths[rows], self.fill)

    def index_select(self, dim: int, rows: Tensor) -> "Ragged":
        return Ragged(self.values, self.starts[rows], self.lengths[rows], self.fill)

    def to(self, device: Any, non_blocking: bool = False) -> "Ragged":
        """The rows are looked up where they are, and a batch is moved when it is padded."""
        return self

    def used(self) -> Tensor:
        """The values of these rows, without those of rows that are not among them."""
        whole = len(self.values) == int(self.lengths.sum())
        return self.values if whole else self.padded()[self._inside()]

    def padded(self) -> Tensor:
        """One tensor, as wide as the longest of these rows."""
        inside = self._inside()
        places = (self.starts.unsqueeze(1) + torch.arange(inside.shape[1])) * inside
        found = self.values[places] if len(self.values) else self.values.new_empty(self.shape)
        return found.masked_fill(
            ~inside.view(*inside.shape, *[1] * (self.values.dim() - 1)), self.fill
        )

    def _inside(self) -> Tensor:
        return torch.arange(self.shape[1]) < self.lengths.unsqueeze(1)


Leaf = Tensor | Ragged
Inputs = Any
"""A leaf, a dict of leaves or a tuple of leaves."""
Result = TypeVar("Result")


def mapped(function: Callable[..., Result], *inputs: Inputs) -> Any:
    """The function on each leaf, or on the leaves of several inputs that belong together."""
    first = inputs[0]
    if isinstance(first, dict):
        return {name: function(*(x[name] for x in inputs)) for name in first}
    if isinstance(first, tuple):
        return tuple(function(*leaves) for leaves in zip(*inputs, strict=True))
    return function(*inputs)


def leaves(x: Inputs) -> list[Any]:
    if isinstance(x, dict):
        return [*x.values()]
    return [*x] if isinstance(x, tuple) else [x]


def size(x: Inputs) -> int:
    """The number of samples."""
    return len(leaves(x)[0])


def take(x: Inputs, rows: Tensor) -> Inputs:
    return mapped(lambda leaf: leaf.index_select(0, rows), x)


def part(x: Inputs, rows: slice) -> Inputs:
    return mapped(lambda leaf: leaf[rows], x)


def parts(x: Inputs, samples: int) -> list[Inputs]:
    """So many samples at a time."""
    return [part(x, slice(start, start + samples)) for start in range(0, size(x), samples)] or [x]


def padded(x: Inputs) -> Inputs:
    """Tensors alone."""
    return mapped(lambda leaf: leaf.padded() if isinstance(leaf, Ragged) else leaf, x)


def joined(inputs: Sequence[Inputs]) -> Inputs:
    """The samples of several, one after another."""
    return mapped(_join, *inputs)


def _join(*found: Leaf) -> Leaf:
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    if len(tensors) == len(found):
        return torch.cat(tensors)
    fill = next(leaf.fill for leaf in found if isinstance(leaf, Ragged))
    return Ragged.of([row for leaf in found for row in _rows(leaf)], fill)


def _rows(leaf: Leaf) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [*leaf]
    ends = (leaf.starts + leaf.lengths).tolist()
    return [leaf.values[a:b] for a, b in zip(leaf.starts.tolist(), ends, strict=True)]


def stacked(inputs: Sequence[Inputs]) -> Inputs:
    """(n, ...) of n inputs that are alike."""
    return mapped(lambda *found: torch.stack(found), *inputs)


def moved(x: Inputs, device: torch.device) -> Inputs:
    """On the way to a GPU nobody waits: the system cannot move the memory that it is copied from
    meanwhile."""
    if device.type != "cuda":
        return mapped(lambda leaf: leaf.to(device), x)
    return mapped(lambda leaf: _pinned(leaf).to(device, non_blocking=True), x)


def _pinned(leaf: Leaf) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.is_cpu else leaf


def is_ragged(*inputs: Inputs) -> bool:
    return any(isinstance(leaf, Ragged) for x in inputs for leaf in leaves(x))


def kind(x: Inputs) -> tuple[object, ...]:
    """What two inputs have in common that can be put side by side."""
    names = tuple(x) if isinstance(x, dict) else ()
    return names, *((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves(x))


def call(module: nn.Module | Callable[..., Any], x: Inputs, **more: Tensor) -> Any:
    """The module with x as it takes it: as keywords, in order, or as one tensor."""
    if isinstance(x, dict):
        return module(**x, **more)
    return module(*x, **more) if isinstance(x, tuple) else module(x, **more)


UNSIGNED = torch.uint16, torch.uint32, torch.uint64
"""Types that torch can do little with."""


def to_inputs(where: str, x: Any, pad: float | Mapping[str, float] | None = None) -> Inputs:
    """From what a user gives: arrays, a dict of arrays, or a tuple of tensors. Rows of unequal
    length need `pad`."""
    if isinstance(x, Mapping):
        if not x:
            raise PrefedError(f"{where}: a dict without arrays")
        fills = pad if isinstance(pad, Mapping) else dict.fromkeys(x, pad)
        found: Inputs = {
            str(name): _leaf(f"{where}[{name!r}]", value, fills.get(name))
            for name, value in x.items()
        }
    elif isinstance(x, tuple) and _are_inputs(x):
        found = tuple(_leaf(where, value, None) for value in x)
    else:
        found = _leaf(where, x, None if isinstance(pad, Mapping) else pad)
    if len(sizes := {len(leaf) if leaf.shape else 0 for leaf in leaves(found)}) > 1:
        a, b, *_ = sorted(sizes)
        raise PrefedError(f"{where}: its arrays have {a} and {b} samples; they should be as many")
    return found


def _are_inputs(values: tuple[Any, ...]) -> bool:
    """Several inputs of a model, and not samples one by one, which arrays of one shape may be."""
    if values and all(isinstance(value, np.ndarray) and value.ndim for value in values):
        lengths, shapes = {len(v) for v in values}, {v.shape for v in values}
        return len(lengths) == 1 and len(shapes) > 1
    return bool(values) and all(isinstance(value, Tensor | Ragged) for value in values)


def _leaf(where: str, value: Any, fill: float | None) -> Leaf:
    if isinstance(value, Ragged):
        return value
    if isinstance(value, list) and value and hasattr(value[0], "__len__"):
        rows = [torch.as_tensor(row) for row in value]
        if len({len(row) for row in rows}) > 1:
            if fill is None:
                raise PrefedError(
                    f"{where}: its rows are of unequal length; say what they are padded with, as "
                    f'pad=0 or pad={{"input_ids": 0, "attention_mask": 0}}'
                )
            return Ragged.of(rows, fill)
        if fill is not None:
            return Ragged.of(rows, fill)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise PrefedError(f"{where}: some of its values are masked; fill them, as x.filled(0) does")
    found = torch.as_tensor(value).detach()  # whatever made it is not trained
    return found.long() if found.dtype in UNSIGNED else found
