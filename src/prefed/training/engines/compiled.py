"""The vectorised engine with its local steps compiled: gradients and rules become a few kernels.

For long runs of small models. Compiling takes half a minute at the start of a run, less if torch
finds the kernels of an earlier run in its cache (TORCHINDUCTOR_CACHE_DIR). It needs a C++ compiler,
and is off unless it is asked for: engine = "auto" does not try it.

Models with BatchNorm or its like, clients with unequal batches, step sizes that change with the
round, tau_relative, and rules that need another gradient run as in the vectorised engine.
"""

import shutil
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.errors import PrefedError
from prefed.core.layout import Entry, Layout
from prefed.data import FederatedData
from prefed.rules import Rule, State
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.engines.stacked_batches import Group, Stack
from prefed.training.engines.vectorised import Vectorised, VectorisedBlock, or_sequential
from prefed.training.round import local_step
from prefed.training.settings import Settings
from prefed.training.task import Task


@ENGINES.register("compiled")
def compiled(task: Task, data: FederatedData, settings: Settings) -> Engine:
    if task.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise PrefedError(
            'engine: "compiled" needs a C++ compiler (g++ or clang++) and none is installed; '
            'use "vectorised" or "auto"'
        )
    return or_sequential(Compiled(task, data, settings))


MOST = 10
"""Steps that are compiled together: more are no faster, and take longer to compile."""
PARTS = 4
"""The steps of a round are compiled in at most this number of parts, each by itself."""
COMPILING = Lock()


class Compiled(Vectorised):
    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        super().__init__(task, data, settings)
        self.compiled_steps = torch.compile(self._steps, dynamic=False)
        self.known: set[tuple[object, ...]] = set()

    def compiling_lock(self, *key: object) -> AbstractContextManager[object]:
        """Held by a worker while something is compiled for the first time: the compiler is not made
        for threads."""
        if key in self.known:
            return nullcontext()
        self.known.add(key)
        return COMPILING

    def make_block(
        self, clients: Sequence[int], steps: list[int], stacks: list[Stack], seeds: list[int]
    ) -> VectorisedBlock:
        return CompiledBlock(self, clients, steps, stacks, seeds)

    def _steps(
        self,
        algorithm: Algorithm,
        rule: Rule,
        point: "_Point",
        state: State,
        batches: list[tuple[Inputs, Tensor, Tensor]],
        lr: float,
        first: int,
    ) -> Tensor:
        losses = torch.zeros_like(point.shares)
        for k, of_step in enumerate(batches):
            losses = losses + self._differentiate(point, *of_step)
            local_step(algorithm, rule, point, state, lr, first + k)
        return losses

    def _differentiate(self, point: "_Point", x: Inputs, y: Tensor, keys: Tensor) -> Tensor:
        layout = self.task.flat.layout
        parameters = cut(layout, point.weights)
        if (direct := self.direct_gradients(y)) is not None:
            found = {name: torch.empty_like(value) for name, value in parameters.items()}
            losses = direct(parameters, found, x, y)
        else:
            found, losses = torch.func.grad(self._loss, has_aux=True)(parameters, x, y, keys)
        point.gradient = join(layout, found)
        return losses

    def _loss(self, parameters: State, x: Inputs, y: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.losses(parameters, {}, x, y, keys)
        return losses.sum(), losses


@dataclass
class _Point:
    """Plain tensors, which the compiler takes as they are."""

    weights: Tensor
    gradient: Tensor
    shares: Tensor

    def cohort_mean(self, rows: Tensor) -> Tensor:
        return self.shares @ rows


class CompiledBlock(VectorisedBlock):
    engine: Compiled

    def is_compiled(self, algorithm: Algorithm) -> bool:
        if callable(algorithm.client_lr):
            warnings.warn(
                "every new step size would have to be compiled; with a schedule for client_lr "
                "clients train as in the vectorised engine",
                EngineWarning,
                stacklevel=2,
            )
            return False
        rule = algorithm.client_rule()
        if rule.other(0) is not None:
            warnings.warn(
                f"{type(algorithm).__name__} needs more than one gradient in a step; its clients "
                f"train as in the vectorised engine",
                EngineWarning,
                stacklevel=2,
            )
            return False
        if rule.elementwise and not rule.in_parts:
            warnings.warn(
                "torch's compiler fails where a mean over all weights stands in a step; with "
                "tau_relative clients train as in the vectorised engine",
                EngineWarning,
                stacklevel=2,
            )
            return False
        if algorithm.state_dtype != "weights":
            return False  # random numbers come from NumPy
        return self.group is not None and self.engine.simple(self.group, self.group.y)

    @property
    def group(self) -> Group | None:
        """All clients, if their batches are alike and the compiler can have them."""
        only = self.stacks[0] if len(self.stacks) == 1 and not self.buffers else None
        return only if isinstance(only, Group) else None

    def rule(self, algorithm: Algorithm) -> Rule:
        """The plain lines: it is the compiler that fuses them."""
        if not self.is_compiled(algorithm):
            return super().rule(algorithm)
        return algorithm.client_rule().fit(self.layout)

    def run_steps(self, algorithm: Algorithm, rule: Rule, state: State, lr: float) -> Tensor:
        if (group := self.group) is None or not self.is_compiled(algorithm):
            return super().run_steps(algorithm, rule, state, lr)
        device, steps = self.engine.task.device, self.steps[0]
        losses = self.weights.new_zeros(len(self.clients))
        parts = min(PARTS, -(-steps // MOST))
        for part in range(parts):
            batches, first = [], steps * part // parts
            for k in range(first, steps * (part + 1) // parts):
                x, y = group.batch(k)
                batches.append((batch.moved(x, device), y.to(device), self.keys(k)))
            point = _Point(self.weights, self.gradient, self.shares)
            with self.engine.compiling_lock(len(self.clients), batch.kind(group.x), first):
                losses += self.engine.compiled_steps(
                    algorithm, rule, point, state, batches, lr, first
                )
        return losses


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
