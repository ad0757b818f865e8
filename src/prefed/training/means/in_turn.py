"""The mean of wide models: one sum, to which clients are added in the order of their positions.

A tree of sums (prefed.training.mean) holds one for each of its levels, of every vector that clients
send. Of a wide model that is most of the memory of a run. Here there is one; whoever comes before
its turn waits, in the memory of the worker that trained it (Workers.updates), or else in a copy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.core.memory import Memory
from prefed.rules import State
from prefed.rules.rule import BLOCK, scratch
from prefed.training.mean import Added, Mean, Rows

WIDE = 1 << 22
"""Weights of a model from which on clients are added up in turn."""


def is_wide(weights: int) -> bool:
    return weights >= WIDE


Receive = Callable[[int], Rows]
"""For the first position of a block, its clients, once they are there."""


@dataclass(frozen=True)
class _Early:
    """A client that came before its turn."""

    values: State
    weight: float
    loss: float


class InTurn(Mean):
    """A mean as `Mean` is one, with the same bits in whatever order clients come, and with fewer
    vectors held if they come in that of their positions. It has no parts that others could go on
    with: what is trained elsewhere comes here to be added.

    elsewhere   for the first position of each block that is trained by others, how to wait for it
    """

    def __init__(
        self, memory: Memory | None = None, elsewhere: Mapping[int, Receive] | None = None
    ) -> None:
        super().__init__(memory)
        self._elsewhere = dict(elsewhere or {})
        self._sum: State = {}
        self._weight = self._loss = 0.0
        self._turn = 0
        self._early: dict[int, _Early] = {}

    def add(self, position: int, values: State, weight: float, loss: float) -> None:
        self.clients += 1
        if position != self._turn:
            held = {name: self._memory.copy(value) for name, value in values.items()}
            self._early[position] = _Early(held, weight, loss)
            return
        self._add(values, weight, loss)
        self._turn += 1
        while self._turn in self._early:
            self._add_early(self._turn)
            self._turn += 1

    def summed(self, rows: Rows) -> Rows:
        return rows

    def take(self, block: Added) -> None:
        super().take(block)
        if (receive := self._elsewhere.pop(self._turn, None)) is not None:
            self.take(receive(self._turn))

    def _add(self, values: State, weight: float, loss: float) -> None:
        if self._sum:
            for name, value in values.items():
                add_times(self._sum[name], value, weight)
        else:
            self._sum = {n: self._memory.copy(value, weight) for n, value in values.items()}
        self._weight += weight
        self._loss += loss * weight

    def _add_early(self, position: int) -> None:
        early = self._early.pop(position)
        self._add(early.values, early.weight, early.loss)
        self._memory.give(early.values.values())

    def result(self) -> tuple[State, float]:
        for position in sorted(self._early):  # behind clients that have not come
            self._add_early(position)
        for value in self._sum.values():
            value.div_(self._weight)
        return self._sum, self._loss / self._weight


class Elsewhere(Mean):
    """Hands blocks on to the process that adds them up."""

    def __init__(self, send: Callable[[Rows], None]) -> None:
        super().__init__()
        self._send = send

    def summed(self, rows: Rows) -> Rows:
        return rows

    def take(self, block: Added) -> None:
        assert isinstance(block, Rows)
        self._send(block)


def add_times(into: Tensor, value: Tensor, weight: float) -> None:
    """into += weight * value, each of the two rounded, with no more than a block of new memory."""
    if weight == 1:
        into.add_(value)
        return
    parts = (tensor.reshape(-1).split(BLOCK) for tensor in (into, value))
    for a, b in zip(*parts, strict=True):
        a.add_(torch.mul(b, weight, out=scratch(b)))
