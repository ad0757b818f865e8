"""Local steps as one graph for torch's compiler: forward, back and rule together.

What is compiled is a function of tensors alone (weights, state, batches, the step size), so that
one graph serves all clients, rounds and workers of a run, and a schedule for the step size compiles
nothing anew.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock, current_thread, main_thread
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prefed.algorithms import Algorithm
from prefed.core.batch import Inputs
from prefed.core.layout import Entry, Layout
from prefed.rules import Rule, State
from prefed.training.block import local_step
from prefed.training.engines.engine import EngineWarning

LARGEST = 2000
"""Operations in a graph (forward and rule, as the model calls them) that is still compiled. Two
layers of a transformer have 437 of them, a ResNet-18 847; what takes the compiler grows with it."""
COMPILING = Lock()

Gradients = Callable[[State, State, Inputs, Tensor, Tensor], tuple[State, Tensor]]
"""(parameters, buffers, x, y, keys of dropout), each with a row a client -> gradients, losses."""
Step = tuple[Inputs, Tensor, Tensor]
"""x, y and keys of dropout."""


@dataclass
class CompiledPoint:
    """Plain tensors, which the compiler takes as they are."""

    weights: Tensor
    gradient: Tensor
    shares: Tensor
    layout: Layout

    def cohort_mean(self, rows: Tensor) -> Tensor:
        return self.shares @ rows


class Refused(Exception):
    """The steps cannot be compiled; a line has said why."""


class Steps:
    """Steps of one run, compiled once and shared by its workers."""

    def __init__(self, layout: Layout, gradients: Gradients) -> None:
        self.compiled = torch.compile(
            _make(gradients, layout), backend=self._backend, dynamic=False, fullgraph=True
        )
        self.known: set[object] = set()
        self.graphs = 0
        self.is_refused = False
        """The compiler could not, and a line has said why."""

    def __call__(
        self,
        kind: object,
        algorithm: Algorithm,
        rule: Rule,
        weights: Tensor,
        shares: Tensor,
        state: State,
        buffers: State,
        steps: Sequence[Step],
        lr: Tensor,
        numbers: Sequence[int],
    ) -> Tensor:
        """Take these steps, which have these numbers in their round; the sum of their losses (C).
        Or be refused, before anything is done."""
        given = algorithm, rule, weights, shares, state, buffers, [*steps], lr, [*numbers]
        if (kind, numbers[0]) in self.known:
            return self.compiled(*given)[0]
        for held in (weights, *state.values(), *buffers.values()) if weights.is_cuda else ():
            torch._dynamo.mark_static_address(held)  # changed in place, so not copied for a launch
        try:
            with COMPILING:  # the compiler is not made for threads
                found, _ = self.compiled(*given)
        except Exception as error:  # it has many ways to say that it does not know something
            self.is_refused = True
            cause = getattr(error, "inner_exception", error)
            reason = str(cause).strip().partition("\n")[0].rstrip(".")
            warnings.warn(
                f"the local steps cannot be compiled ({reason}); clients train without it",
                EngineWarning,
                stacklevel=2,
            )
            raise Refused from None
        self.known.add((kind, numbers[0]))
        return found

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        """torch's compiler, unless there would be too much for it to do. On a GPU all kernels of a
        graph are launched as one, which torch can do in the main thread alone."""
        size = len(graph.graph.nodes)
        if size > LARGEST:
            raise ValueError(f"a graph of {size} operations would take the compiler minutes")
        self.graphs += 1
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
        recorded = (
            {"triton.cudagraphs": True} if on_gpu and current_thread() is main_thread() else {}
        )
        inductor: Any = torch._dynamo.lookup_backend("inductor")
        return inductor(graph, inputs, config_patches=recorded)


def _make(gradients: Gradients, layout: Layout) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that is compiled, with code of its own: torch counts by code how often it has
    compiled, and would give up on the ninth run of a process."""

    def take(
        algorithm: Algorithm,
        rule: Rule,
        weights: Tensor,
        shares: Tensor,
        state: State,
        buffers: State,
        steps: list[Step],
        lr: Any,
        numbers: list[int],
    ) -> tuple[Tensor, Tensor]:
        losses = torch.zeros_like(shares)
        for k, (x, y, keys) in zip(numbers, steps, strict=True):
            found, of_step = gradients(cut(layout, weights), buffers, x, y, keys)
            losses = losses + of_step
            point = CompiledPoint(weights, join(layout, found), shares, layout)
            with TensorRates():  # a number that is not looked at makes no graph of its own
                local_step(algorithm, rule, point, state, lr, k)
        return losses, point.gradient  # kept, or torch's compiler fails where a norm is taken of it

    return FunctionType(take.__code__.replace(), globals(), "take", None, take.__closure__)


class TensorRates(TorchFunctionMode):
    """Lets a step size be a tensor where torch wants a number: x.add_(y, alpha=lr) becomes
    x.add_(y * lr)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for name, place in (("alpha", -1), ("value", 1)):
            if isinstance(factor := kwargs.get(name), Tensor):
                kwargs = {key: value for key, value in kwargs.items() if key != name}
                scaled = [*args]
                scaled[place] = scaled[place] * factor
                args = tuple(scaled)
        return func(*args, **kwargs)


def skeleton(module: nn.Module) -> nn.Module:
    """The module with parameters of the same memory, in training mode whatever is done with the
    original: the compiler looks at it, and nobody else. Buffers are its own, or a graph would be
    for the one worker whose buffers they are."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()}).train()


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
    """The dimensions of a tensor as they lie in memory, the slowest first; of two with one stride
    that of length 1 last, as a single channel has it where channels are last: its stride decides
    the format of all that follows."""
    return sorted(range(len(entry.shape)), key=lambda i: (-entry.stride[i], entry.shape[i] == 1))
