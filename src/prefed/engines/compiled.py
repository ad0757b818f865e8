"""The vectorised engine with its local step compiled: gradient and rule become a few kernels.

Worth a try in long runs, where the rule costs as much as the gradient (bench/step.py); for chains
of linear layers the batched products are as fast (docs/engines.md). Compiling takes some seconds at
the start of a run, less if torch finds the kernels of an earlier run in its cache
(TORCHINDUCTOR_CACHE_DIR). It needs a C++ compiler, and is off unless it is asked for: engine =
"auto" does not try it.

A step is compiled, not the loop over steps: that is no faster, and takes far longer to compile.
Models with buffers, and full batches of unequal size, run as in the vectorised engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.engines.base import ENGINES, Engine
from prefed.engines.gather import Group
from prefed.engines.vectorised import Rows, Vectorised, or_sequential
from prefed.errors import PrefedError
from prefed.layout import Entry, Layout
from prefed.round import descend
from prefed.rules import Rule
from prefed.rules.base import State
from prefed.settings import Settings
from prefed.task import Task


@ENGINES.register("compiled")
def compiled(task: Task, data: FederatedData, settings: Settings) -> Engine:
    if task.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise PrefedError(
            'engine: "compiled" needs a C++ compiler (g++ or clang++) and none is installed; '
            'use "vectorised" or "auto"'
        )
    return or_sequential(Compiled(task, data, settings))


class Compiled(Vectorised):
    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        super().__init__(task, data, settings)
        self.step = torch.compile(self._step)

    def rows_of(self, clients: Sequence[int], groups: list[Group], seeds: list[int]) -> Rows:
        return _Rows(self, clients, groups, seeds)

    def _step(
        self,
        algorithm: Algorithm,
        rule: Rule,
        place: _Position,
        state: State,
        batch: tuple[Tensor, Tensor, Tensor],
        lr: float,
        k: int,
    ) -> Tensor:
        def loss(leaves: State) -> tuple[Tensor, Tensor]:
            each = self.losses(leaves, {}, *batch)
            return each.sum(), each

        layout = self.task.flat.layout
        found, losses = torch.func.grad(loss, has_aux=True)(cut(layout, place.weights))
        place.gradient = join(layout, found)
        descend(algorithm, rule, place, state, lr, k)
        each: Tensor = losses
        return each


@dataclass
class _Position:
    """Plain tensors, which the compiler takes as they are."""

    weights: Tensor
    gradient: Tensor
    shares: Tensor

    def cohort_mean(self, rows: Tensor) -> Tensor:
        return self.shares @ rows


class _Rows(Rows):
    engine: Compiled

    def rule(self, algorithm: Algorithm) -> Rule:
        """The plain lines: it is the compiler that fuses them."""
        return algorithm.client_rule().fit(self.layout)

    def step(self, algorithm: Algorithm, rule: Rule, state: State, lr: float, k: int) -> Tensor:
        if len(self.groups) > 1 or self.buffers:
            return super().step(algorithm, rule, state, lr, k)
        device = self.engine.task.device
        x, y = self.groups[0].batch(k)
        batch = (x.to(device), y.to(device), self.keys(k))
        place = _Position(self.weights, self.gradient, self.shares)
        return self.engine.step(algorithm, rule, place, state, batch, lr, k)


def cut(layout: Layout, rows: Tensor) -> State:
    """The named tensors inside (C, d), in operations that a compiler sees through."""
    found = {}
    for entry in layout.entries:
        order = _order(entry)
        shape = [entry.shape[i] for i in order]
        dense = rows[:, entry.offset : entry.offset + torch.Size(shape).numel()]
        back = [1 + order.index(i) for i in range(len(order))]
        found[entry.name] = dense.reshape(len(rows), *shape).permute(0, *back)
    return found


def join(layout: Layout, named: State) -> Tensor:
    """The inverse of cut."""
    parts = [named[e.name].permute(0, *(1 + i for i in _order(e))) for e in layout.entries]
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


def _order(entry: Entry) -> list[int]:
    """The dimensions of a tensor as they lie in memory, the slowest first."""
    return sorted(range(len(entry.shape)), key=lambda i: -entry.stride[i])
