"""Where named tensors lie inside a flat vector."""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
    kind: str = field(default="", compare=False)
    """Of the layer it belongs to, if that is known: "embedding", or "matrix" of a layer that
    multiplies with it."""

    def lies_as(self, stride: tuple[int, ...]) -> bool:
        """Its numbers have the places that these strides give; those of a dimension of size 1 do
        not matter."""
        both = zip(self.shape, self.stride, stride, strict=True)
        return all(size == 1 or own == other for size, own, other in both)

    def view(self, rows: Tensor) -> Tensor:
        """This tensor inside a vector (d), or inside each row of (C, d), sharing its memory."""
        return strided(rows, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies inside a flat vector."""

    entries: tuple[Entry, ...]
    size: int

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, Tensor]], kinds: Mapping[str, str] | None = None
    ) -> "Layout":
        """Of these tensors, one behind the other; `kinds` says of some what they are."""
        entries, offset, known = [], 0, kinds or {}
        for name, tensor in tensors:
            dense = torch.empty_like(tensor, memory_format=torch.preserve_format)
            shape, kind = tuple(tensor.shape), known.get(name, "")
            entries.append(Entry(name, shape, dense.stride(), offset, kind))
            offset += tensor.numel()
        return cls(tuple(entries), offset)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """All named tensors inside a vector (d), or inside each row of (C, d)."""
        return {entry.name: entry.view(rows) for entry in self.entries}
