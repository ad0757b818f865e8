"""Small networks in C: all local steps of a client in one call.

torch needs some 5 microseconds for each operation and moves what is between layers through
memory that it asks for anew; of a network of a few thousand weights that is most of a step. Here
a chain of layers (chain.c, winograd.c), a transformer (transformer.c), a residual network
(resnet.c) or an LSTM (lstm.c) becomes a C program, compiled once for the model and the batch size:
forward, back and, where the rule has a form in C (Rule.in_c), the step too, one client after
another, so that its vectors stay in the cache. Anything else about a round is as in the vectorised
engine.

It needs a C compiler. What cannot be written in C trains without it, after one line that says why.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from prefed.algorithms import Algorithm
from prefed.core import batch, draws
from prefed.core.batch import Inputs
from prefed.core.c_programs import CannotCompile
from prefed.core.errors import PrefedError
from prefed.core.hands import ALONE
from prefed.core.losses import WITH_CLASSES, are_labels
from prefed.core.parts import timed
from prefed.data import FederatedData
from prefed.data.samples import LazySamples
from prefed.rules import Rule, State
from prefed.rules.rule import in_c
from prefed.training.engines.block_losses import one_by_one, transform_of_blocks
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.engines.native_program import Program
from prefed.training.engines.native_writing import NotNative
from prefed.training.engines.sequential import Sequential
from prefed.training.engines.stacked_batches import Alike, ByNumber, Stack, Unequal
from prefed.training.engines.vectorised import Rows, Vectorised, VectorisedBlock
from prefed.training.settings import Settings
from prefed.training.subtrees import compile_subtrees
from prefed.training.task import Task

BLOCK_SIZE = 1 << 19
"""Weights of all clients of a block, about: what is done once a block costs little then, and there
are several blocks for workers to share."""
WHOLE = 1 << 24
"""Weights of all clients of a cohort that is one block, at most."""
SAMPLES = 1 << 24
"""Numbers of their samples, at most."""
TOGETHER = 1 << 22
"""Numbers of samples that are prepared at a time."""
Work = tuple[Tensor, Tensor, Tensor | None]
"""x and y of some clients (C, B, ...); or all x there are, y (C, B), and their numbers (C, B)."""


@ENGINES.register("native")
def native(task: Task, data: FederatedData, settings: Settings) -> Engine:
    try:
        engine = Native(task, data, settings)
        if (reason := engine.why_not()) is None:
            draws.compile_batches()
            compile_subtrees()
            return engine
    except NotNative as error:
        reason = str(error)
    other = Vectorised(task, data, settings)
    blocks = other.gradients is not None and other.why_not() is None
    does = "in blocks of torch's operations" if blocks else "one after another"
    warnings.warn(f"not in C ({reason}); clients train {does}", EngineWarning, stacklevel=2)
    return other if blocks else Sequential(task, data, settings)


class Native(Vectorised):
    way = "C"

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        if any(isinstance(layer, nn.RNNBase) for layer in task.flat.module.modules()):
            self.each = one_by_one  # what is not in C: vmap does not know such layers
        super().__init__(task, data, settings)
        if task.device.type != "cpu":
            raise NotNative(f"device {task.device.type}")
        if task.loss not in WITH_CLASSES:
            raise NotNative("its loss is not the cross-entropy")
        if task.randomness != "none" or task.flat.buffers.changing:
            raise NotNative("it draws numbers, or has statistics")
        first = data.client(0)
        if first.is_ragged:
            raise NotNative("samples are of unequal length")
        raw, _ = first.take(torch.arange(1))
        self.prepare = transform_of_blocks(task)
        try:
            x = self.prepare(batch.mapped(lambda leaf: leaf[None], raw))
        except Exception as error:  # a transform that vmap cannot run
            raise NotNative(str(error).strip().partition("\n")[0].rstrip(".")) from error
        if not isinstance(x, Tensor) or not isinstance(raw, Tensor):
            raise NotNative("a sample is not one tensor")
        self.raw_shape, self.shape = raw.shape[1:], x.shape[2:]
        """Of a sample, before and after it is transformed: the program is for no other."""
        weights, size = task.flat.weights, settings.batch_size or len(first)
        self.program = Program(task.flat.module, task.flat.layout, self.shape, weights.dtype, size)
        self.scratch = self.program.scratch()
        self.hands = ALONE
        self.rooms: list[tuple[Tensor, Tensor]] = []
        """What each of them works in."""
        self.no_rules: set[str] = set()
        """Lines that the compiler has refused."""

    def block_size(self, algorithm: Algorithm, cohort: int) -> int:
        by_state = self.most_clients_by_state(algorithm)
        if cohort <= min(by_state, self.most_divided) and self.steps_in_c(algorithm):
            return cohort
        fit = min(self.most_clients, by_state)
        size = max(1, min(fit, BLOCK_SIZE // self.task.flat.layout.size, (cohort + 1) // 2))
        return math.ceil(cohort / math.ceil(cohort / size))

    @property
    def most_divided(self) -> int:
        """Clients of a cohort that is one block, which the hands divide: their batches are drawn,
        and all else is done that is not in C, at once."""
        settings = self.settings
        if settings.local_steps is None or settings.batch_size is None or self.data.augment:
            return 0
        samples = settings.local_steps * settings.batch_size * math.prod(self.raw_shape)
        return min(WHOLE // self.task.flat.layout.size, SAMPLES // max(1, samples))

    def steps_in_c(self, algorithm: Algorithm) -> bool:
        """The steps of its clients are in C, unless the compiler refuses the rule."""
        rule = algorithm.client_rule().fit(self.task.flat.layout)
        wrapped = algorithm.align or algorithm.decoupled_weight_decay or algorithm.groups
        other = algorithm.clip_norm is not None or algorithm.state_dtype != "weights"
        more = rule.lockstep or rule.other(0) is not None
        lines = in_c(rule)
        return lines is not None and lines not in self.no_rules and not (wrapped or other or more)

    def together(self, clients: int) -> int:
        return max(self.most_clients, min(clients, self.most_divided))

    def make_block(
        self, clients: Sequence[int], steps: list[int], stacks: list[Stack], seeds: list[int]
    ) -> VectorisedBlock:
        return NativeBlock(self, clients, steps, stacks, seeds)

    def samples(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """x and y of some clients (C, B, ...) as the program takes them; None if it does not."""
        x = self.prepare(x)
        if not isinstance(x, Tensor) or x.shape[2:] != self.shape:
            return None
        x = x.to(self.task.flat.weights.dtype)
        return x if x[0].is_contiguous() else x.contiguous(), y.to(torch.int64).contiguous()

    def outputs(self, x: Inputs) -> Tensor | None:
        """The model's output for a batch that is evaluated; None for one that is not as those of
        the clients."""
        if not isinstance(x, Tensor) or x.shape[1:] != self.raw_shape or not len(x):
            return None
        prepared = self.prepare(x[None])
        if not isinstance(prepared, Tensor) or prepared.shape[2:] != self.shape:
            return None
        weights = self.task.flat.weights
        return self.program.outputs(weights, prepared[0].to(weights).contiguous(), self.scratch)

    def are_labels(self, y: Tensor, dimensions: int) -> bool:
        """As many as the program takes for each sample, behind so many dimensions."""
        return y.shape[dimensions:] == self.program.labels and are_labels(y)

    def room(self, hand: int, state: State, batch: int) -> tuple[Tensor, Tensor]:
        """What a hand works in: memory for the vectors of a client that is taking its steps, and
        for a pass."""
        while hand >= len(self.rooms):
            self.rooms.append((self.task.flat.weights.new_empty(0), self.program.scratch()))
        vectors, scratch = self.rooms[hand]
        if len(vectors) < (needed := self.program.room(state, batch)):
            vectors = vectors.new_empty(needed)
            self.rooms[hand] = vectors, scratch
        return vectors, scratch

    def rule(self, lines: str, state: Sequence[str]) -> Any:
        """A rule in C; None, after one line, if the compiler refuses it."""
        if lines in self.no_rules:
            return None
        try:
            return self.program.rule(lines, state)
        except CannotCompile as reason:
            self.no_rules.add(lines)
            warnings.warn(f"the rule is not in C ({reason})", EngineWarning, stacklevel=2)
            return None


class NativeBlock(VectorisedBlock):
    engine: Native
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
        return self.weights if self.is_direct else super().change(start)

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
