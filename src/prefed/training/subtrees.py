"""Sums over clients at neighbouring positions, as the tree of a mean has them."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefed.core.c_programs import CannotCompile, compiled, pointer

PART = 256
"""Numbers of each row that the program in C has in the cache."""
TYPES = {torch.float32: "float", torch.float64: "double"}


class Level(NamedTuple):
    """Rows of one level of the tree."""

    number: int
    first: int
    """The position of the first of them."""
    alone: list[int]
    """Those whose sibling lies outside: they stay at this level."""
    left: slice
    """The others, pair by pair."""
    right: slice


@lru_cache
def levels(first: int, rows: int) -> tuple[Level, ...]:
    """From the leaves up, for so many from this position on."""
    found, number = list[Level](), 0
    while rows:
        start, stop = first & 1, rows - ((first + rows) & 1)
        alone = [0] * start + [rows - 1] * (rows - stop)
        pairs = slice(start, stop, 2), slice(start + 1, stop, 2)
        found.append(Level(number, first, alone, *pairs))
        first, rows, number = (first + start) >> 1, (stop - start) // 2, number + 1
    return tuple(found)


def subtrees(first: int, value: Tensor, weights: Sequence[float] | None) -> Iterator[Tensor]:
    """Of rows (C, ...), each times its weight: the sums that stay alone, level by level. Rows that
    are alone from the beginning are given as they are, unless there are weights."""
    if _fits(value) and (program := _in_c.get(value.dtype)) is not None:
        return _summed_in_c(program, first, value, weights)
    return _summed(first, value, weights)


def _summed(first: int, value: Tensor, weights: Sequence[float] | None) -> Iterator[Tensor]:
    if weights is not None:
        value = value * value.new_tensor(weights).view(-1, *[1] * (value.dim() - 1))
    for level in levels(first, len(value)):
        yield from (value[row] for row in level.alone)
        value = value[level.left] + value[level.right]


# The same in C, to the bit: one pass over memory, and not one for each level and operation.

_in_c: dict[torch.dtype, Any] = {}


def compile_subtrees() -> None:
    """Add up in C from now on, where there is a compiler. For engines that compile anyhow."""
    source = files("prefed.training").joinpath("sums.c").read_text()
    head = f"#define PART {PART}\n#define REAL "
    with suppress(CannotCompile):
        for dtype, real in TYPES.items():
            program = compiled(f"{head}{real}\n{source}", "-ffp-contract=off")
            _in_c[dtype] = program.sums


def _fits(value: Tensor) -> bool:
    """It lies in a way that the program knows."""
    return value.device.type == "cpu" and value.dim() == 2 and value[0].is_contiguous()


def _summed_in_c(
    program: Any, first: int, value: Tensor, weights: Sequence[float] | None
) -> Iterator[Tensor]:
    rows, size = value.shape
    given = levels(first, rows)[0].alone if weights is None else []
    alone = sum(len(level.alone) for level in levels(first, rows)) - len(given)
    out, part = value.new_empty(alone, size), value.new_empty(rows // 2, PART)
    factors = None if weights is None else value.new_tensor(weights)
    program(
        *map(ctypes.c_int64, (rows, first, size)), pointer(value), ctypes.c_int64(value.stride(0)),
        pointer(factors), pointer(out), pointer(part),
    )  # fmt: skip
    yield from (value[row] for row in given)
    yield from out
