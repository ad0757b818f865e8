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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prefed.algorithms import Algorithm
from prefed.core import batch, draws
from prefed.core.batch import Inputs
from prefed.core.c_programs import CannotCompile
from prefed.core.hands import ALONE
from prefed.core.losses import WITH_CLASSES, are_labels
from prefed.data import FederatedData
from prefed.rules import State
from prefed.rules.rule import in_c
from prefed.training.engines.block_losses import one_by_one, transform_of_blocks
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.engines.native_block import NativeBlock
from prefed.training.engines.native_program import Program
from prefed.training.engines.native_writing import NotNative
from prefed.training.engines.sequential import Sequential
from prefed.training.engines.stacked_batches import Stack
from prefed.training.engines.vectorised import Vectorised, VectorisedBlock
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
            scratch = self.program.scratch() if self.rooms else self.scratch
            self.rooms.append((self.task.flat.weights.new_empty(0), scratch))
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
