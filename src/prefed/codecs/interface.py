"""What a codec is."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator
from torch import Tensor

from prefed.codecs.sending import sent_in_c
from prefed.core import draws
from prefed.core.errors import PrefedError, did_you_mean
from prefed.core.hands import Hands
from prefed.core.layout import Layout
from prefed.core.registry import Registry

Parts = dict[str, Tensor]
"""A message: named tensors with a row for each client, of types that NumPy has too. Their bytes are
what is sent."""
Form = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The type and shape, for one client, of each part of a message."""
Noise = Callable[[int], Tensor]
"""noise(n): the next random numbers for each client (C, n), uniform over all values of int16."""

TINY = torch.finfo(torch.float32).tiny
"""The smallest normal float32. Scales are not smaller."""
HUGE = torch.finfo(torch.float32).max
PIECE, ALIGNED = 1 << 18, 512
"""Numbers in a piece of a vector, and what its length is a multiple of, as all blocks divide it."""


class Codec(ABC):
    """Turns the rows of (C, d), a flat vector for each client, into a message and back.

    A codec is unbiased (the mean of decode(encode(x)) over its draws is x), or has `feedback`, or
    says in its docstring what it does keep. Each client's message depends on its own row and
    draws alone, and its length on the layout alone. Numbers that are not finite come out as
    numbers that are not finite, at least where they were.
    """

    signed: ClassVar[bool] = True
    """Takes values of both signs; otherwise it is for P and the like."""
    feedback: ClassVar[bool] = False
    """Biased: a client keeps what was lost and adds it to what it sends the next time."""

    @abstractmethod
    def form(self, layout: Layout, like: Tensor) -> Form:
        """The parts of one client's message for a value like `like`."""

    @abstractmethod
    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts: ...

    @abstractmethod
    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        """The values (C, ...), of the type of `like`."""

    def nbytes(self, layout: Layout, like: Tensor) -> int:
        """The exact length of one client's message."""
        form = self.form(layout, like)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in form.values())


class Blockwise(Codec):
    """A codec that treats each block of coordinates by itself.

    It works through a vector in pieces, because what it fetches from memory and puts there
    between two lines costs more than the arithmetic (bench/codecs.py).
    """

    block: ClassVar[int] = 1

    @abstractmethod
    def lengths(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        """The parts for a vector of this size."""

    def prepare(self, x: Tensor) -> Tensor:
        """As float32."""
        return vector(x)

    @abstractmethod
    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        """Of float32 (C, n)."""

    @abstractmethod
    def decode_piece(self, parts: Parts, size: int) -> Tensor: ...

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {name: (dtype, (n,)) for name, (dtype, n) in self.lengths(layout.size).items()}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        parts = {
            name: x.new_empty(len(x), n, dtype=dtype)
            for name, (dtype, n) in self.lengths(layout.size).items()
        }
        for a, b in self._pieces(len(x), layout.size):
            piece = self._encoded(x[:, a:b], noise)
            for name, part in self._slices(parts, a, b).items():
                part.copy_(piece[name])
        return parts

    def in_c(self) -> str | None:
        """What `send` does with a block of 512 numbers, in C, with the same bits: a function
        `block` below sent.c; None if nobody has written it down."""
        return None

    def send(self, x: Tensor, noise: Noise, hands: Hands | None = None) -> None:
        """What decode(encode(x)) is, in place of x; in C by these hands, if there are any and it
        can be."""
        if hands is not None and isinstance(noise, draws.Noise) and self._has_c():
            lines = self.in_c()
            if lines is not None and sent_in_c(lines, x, noise, hands):
                return
        for a, b in self._pieces(*x.shape):
            x[:, a:b] = self.decode_piece(self._encoded(x[:, a:b], noise), b - a)

    def _has_c(self) -> bool:
        """What a class inherits is of another codec if its own pieces are others."""
        order = [vars(kind) for kind in type(self).__mro__]
        places = ("in_c", "prepare", "encode_piece", "decode_piece")
        own, *others = (next(n for n, names in enumerate(order) if p in names) for p in places)
        return own <= min(others)

    def _encoded(self, x: Tensor, noise: Noise) -> Parts:
        return self.encode_piece(self.prepare(x), noise(x.shape[1]).to(x.device))

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        rows = len(next(iter(parts.values())))
        x = like.new_empty(rows, layout.size)
        for a, b in self._pieces(rows, layout.size):
            x[:, a:b] = self.decode_piece(self._slices(parts, a, b), b - a)
        return x

    def _pieces(self, rows: int, size: int) -> list[tuple[int, int]]:
        each = max(1, PIECE // (rows * ALIGNED)) * ALIGNED
        return [(a, min(a + each, size)) for a in range(0, size, each)]

    def _slices(self, parts: Parts, a: int, b: int) -> Parts:
        start, stop = self.lengths(a), self.lengths(b)
        return {n: part[:, start[n][1] : stop[n][1]] for n, part in parts.items()}


CODECS: Registry[Callable[..., Codec]] = Registry("codec", "prefed.codecs")


@cache
def codec(name: str) -> Codec:
    """The codec of a name such as "log8", or "topk(0.05)" for one that takes numbers."""
    match = re.fullmatch(r"([^()\s]+)(?:\(([^()]*)\))?", name.strip())
    if match is None:
        raise PrefedError(f"unknown codec {name!r}; write a name, or name(number)")
    make = CODECS.get(match[1])
    try:
        numbers = [float(text) for text in match[2].split(",")] if match[2] else []
        return make(*numbers)
    except (TypeError, ValueError) as error:
        raise PrefedError(f"codec {name!r}: {error}") from None


def _known(name: str) -> str:
    try:
        codec(name)
    except PrefedError as error:
        base = name.partition("(")[0]
        if base in CODECS.names() or ":" in base:
            raise ValueError(f"should be the name of a codec ({error})") from None
        raise ValueError(
            f"should be the name of a codec{did_you_mean(base, CODECS.names())}"
        ) from None
    return name


CodecName = Annotated[str, AfterValidator(_known)]


def uniform(noise: Tensor) -> Tensor:
    """Numbers in (0, 1) from 16 random bits each, all multiples of 2^-17."""
    return noise.to(torch.float32).add_(32768.5).div_(65536)


def blocks(x: Tensor, size: int) -> Tensor:
    """(C, n) as (C, n / size, size), the last block filled up with zeros."""
    rest = -x.shape[1] % size
    full = torch.nn.functional.pad(x, (0, rest)) if rest else x
    return full.reshape(len(x), -1, size)


def unblock(rows: Tensor, size: int) -> Tensor:
    """Undo `blocks`."""
    return rows.flatten(1)[:, :size]


def vector(x: Tensor) -> Tensor:
    """As float32, in which codecs calculate; numbers too large for it become the largest."""
    if x.dtype == torch.float32:
        return x
    return torch.where(x.isfinite(), x.clamp(-HUGE, HUGE), x).to(torch.float32)
