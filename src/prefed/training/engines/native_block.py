"""A block of clients whose local steps are in C (native.py)."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.errors import PrefedError
from prefed.core.parts import timed
from prefed.data.samples import LazySamples
from prefed.rules import Rule, State
from prefed.rules.rule import in_c
from prefed.training.engines.stacked_batches import Alike, ByNumber, Stack, Unequal
from prefed.training.engines.vectorised import Rows, VectorisedBlock

if TYPE_CHECKING:
    from prefed.training.engines.native import Native

TOGETHER = 1 << 22
"""Numbers of samples that are prepared at a time."""
Work = tuple[Tensor, Tensor, Tensor | None]
"""x and y of some clients (C, B, ...); or all x there are, y (C, B), and their numbers (C, B)."""


class NativeBlock(VectorisedBlock):
    engine: "Native"
    is_direct = False
    """Clients begin in the program, which leaves how far they have moved in place of weights."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.firsts: dict[str, tuple[Tensor, Tensor]] = {}
        """Rows, and what clients begin with in their place."""

    def _fill(self, stack: Stack, rows: Rows, x: Inputs, y: Tensor, key: Tensor) -> Tensor:
        engine = self.engine
        fits = engine.are_labels(y, 2) and engine.simple(stack, y)
        if not fits or (samples := engine.samples(x, y)) is None:
            return super()._fill(stack, rows, x, y, key)
        weights, gradient = self.weights[rows], self.gradient[rows]
        losses = weights.new_zeros(len(weights))
        engine.program.gradients(weights, gradient, *samples, losses, engine.scratch)
        if not isinstance(rows, slice):  # they were copied
            self.gradient[rows] = gradient
        return losses

    def rule(self, algorithm: Algorithm) -> Rule:
        plain = algorithm.client_rule().fit(self.layout)
        alone = not (algorithm.align or algorithm.decoupled_weight_decay or algorithm.groups)
        if not alone or in_c(plain) is None:
            return super().rule(algorithm)
        steps_in_c = self.engine.steps_in_c(algorithm)
        self.is_direct = steps_in_c and self._nobody_looks(algorithm, plain) and self._in_one_call()
        return plain

    def _nobody_looks(self, algorithm: Algorithm, rule: Rule) -> bool:
        """At the weights and the state of clients, before their first step and after their last."""
        kind, own = type(rule), algorithm.sharing().values()
        plain = kind.begin is Rule.begin and kind.finish is Rule.finish
        of_all = type(algorithm).in_turns is Algorithm.in_turns and not algorithm.personal
        return plain and of_all and not any(policy.kept_between for policy in own)

    def _in_one_call(self) -> bool:
        if len(self.stacks) != 1 or not isinstance(stack := self.stacks[0], Alike):
            return False
        return stack.size is not None and self.engine.task.transform is None and self._in_c(stack)

    def begin_at(self, name: str, rows: Tensor, value: Tensor) -> None:
        """In the program, which needs no copy for each client, if nobody else looks at them."""
        if self.is_direct and value.is_contiguous():
            self.firsts[name] = rows, value
        else:
            super().begin_at(name, rows, value)

    def change(self, start: Tensor) -> Tensor:
        begun = self.is_direct and "weights" in self.firsts
        return self.weights if begun else super().change(start)

    def run_steps(self, algorithm: Algorithm, rule: Rule, state: State, lr: float) -> Tensor:
        lines = in_c(rule) if self.engine.steps_in_c(algorithm) else None
        alike = all(value.dtype == self.weights.dtype for value in state.values())
        step = None
        if lines is not None and alike and all(map(self._in_c, self.stacks)):
            step = self.engine.rule(lines, [*state])
        if step is None:
            self.is_direct = False
            for held, value in self.firsts.values():
                held.copy_(value)
            return super().run_steps(algorithm, rule, state, lr)
        losses = self.weights.new_zeros(len(self.clients))
        for stack in self.stacks:
            for rows, sizes, samples in self._work(stack):
                self._steps(step, state, rows, sizes, samples, losses, lr, algorithm.weight_decay)
        return losses

    @timed("local steps in C")
    def _steps(
        self,
        rule: Any,
        state: State,
        rows: slice,
        sizes: list[int],
        samples: Work,
        losses: Tensor,
        lr: float,
        decay: float,
    ) -> None:
        engine, (_, _, numbers) = self.engine, samples
        batch = 0 if numbers is None else max(sizes)
        firsts = {name: value for name, (_, value) in self.firsts.items()}
        own = {name: value[rows] for name, value in state.items()}
        steps = engine.program.steps(
            rule, self.weights[rows], own, sizes, *samples, losses[rows], lr, decay, firsts
        )
        hands = range(min(engine.hands.count, len(losses[rows])))
        engine.hands.work([partial(steps, *engine.room(hand, state, batch)) for hand in hands])

    def _in_c(self, stack: Stack) -> bool:
        """All its batches can be given to the program, as far as can be told beforehand."""
        if isinstance(stack, Unequal):
            held, augment = [batches.samples for batches in stack.clients], self.data.augment
            if augment is not None and not getattr(augment, "keeps_shape", False):
                return False
            if any(isinstance(s, LazySamples) for s in held):
                return False
            return all(self._fits(stack, samples.x, samples.y, 1) for samples in held)
        if not isinstance(stack, Alike) or not isinstance(stack.rows, slice):
            return False
        if self._by_number(stack):
            return self._fits(stack, stack.whole.x, stack.whole.y, 1)
        return self._fits(stack, stack.x, stack.y, 2)

    def _by_number(self, stack: Stack) -> TypeGuard[ByNumber]:
        """The program can take its samples from where they lie."""
        if not isinstance(stack, ByNumber) or self.engine.task.transform is not None:
            return False
        if self.engine.program.labels:
            return False
        x = stack.whole.x
        return isinstance(x, Tensor) and x.dtype == self.weights.dtype and x.is_contiguous()

    def _fits(self, stack: Stack, x: Inputs, y: Any, dimensions: int) -> bool:
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            return False
        engine = self.engine
        right = x.shape[dimensions:] == engine.raw_shape and engine.are_labels(y, dimensions)
        return right and engine.simple(stack, y)

    def _work(self, stack: Stack) -> Iterator[tuple[slice, list[int], Work]]:
        """Rows of the block, the sizes of batches that follow one another, and their samples."""
        engine = self.engine
        if isinstance(stack, Unequal):
            for row, batches in enumerate(stack.clients):
                found = (batches[k] for k in range(len(batches)))
                pairs = ((batch.mapped(lambda v: v[None], x), y[None]) for x, y in found)
                for part in self._together(pairs):
                    yield slice(row, row + 1), *part
            return
        assert isinstance(stack, Alike)
        assert isinstance(stack.rows, slice)
        steps = self.steps[0]
        if self._by_number(stack):
            x, y, numbers = stack.whole.x, stack.y.to(torch.int64), stack.numbers
            yield stack.rows, [stack.size] * steps, (x, y.contiguous(), numbers)
            return
        if stack.size is not None and engine.task.transform is not None:
            for part in self._together(stack.batch(k) for k in range(steps)):
                yield stack.rows, *part
            return
        x, y = self._samples(stack.x, stack.y)
        if stack.size is not None:
            yield stack.rows, [stack.size] * steps, (x, y, None)
        else:
            for _ in range(steps):
                yield stack.rows, [y.shape[1]], (x, y, None)

    def _samples(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        if (found := self.engine.samples(x, y)) is None:
            raise PrefedError("engine: data.transform gives samples of unequal shape: not native")
        return found

    def _together(self, pairs: Iterator[tuple[Inputs, Tensor]]) -> Iterator[tuple[list[int], Work]]:
        """Batches side by side, as many as fit."""
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        size = 0
        for pair in pairs:
            x, y = self._samples(*pair)
            xs.append(x)
            ys.append(y)
            size += x.numel()
            if size > TOGETHER:
                yield [y.shape[1] for y in ys], (torch.cat(xs, 1), torch.cat(ys, 1), None)
                xs, ys, size = [], [], 0
        if xs:
            yield [y.shape[1] for y in ys], (torch.cat(xs, 1), torch.cat(ys, 1), None)
