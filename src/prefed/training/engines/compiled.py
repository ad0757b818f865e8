"""Local steps compiled: forward, back and rule become a few kernels.

Of small models a block of clients is compiled together, as the vectorised engine has it; of larger
ones a single client, as the sequential engine has it. Compiling takes up to a minute at the
start of a run, less if torch finds the kernels of an earlier run in its cache
(TORCHINDUCTOR_CACHE_DIR). It needs a C++ compiler, and is off unless it is asked for:
engine = "auto" does not try it.

What cannot be compiled (models that are too large or draw from torch's generator, rules that need
another gradient) trains without it, after one line that says why.
"""

import shutil
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.errors import PrefedError
from prefed.data import FederatedData
from prefed.rules import Rule, State
from prefed.training.engines.block_losses import Losses, losses_of, one_client
from prefed.training.engines.compiled_steps import Gradients, Step, Steps, skeleton
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.engines.sequential import Sequential, SequentialBlock
from prefed.training.engines.stacked_batches import Group, Stack
from prefed.training.engines.vectorised import Vectorised, VectorisedBlock
from prefed.training.round import Server, local_step
from prefed.training.settings import Settings
from prefed.training.task import Task

MOST = 10
"""Steps of a chain of linear layers that are compiled together: more are no faster, and take longer
to compile. Of any other model it is one step."""
PARTS = 4
"""The steps of a round are compiled in at most this number of parts, each by itself."""


@ENGINES.register("compiled")
def compiled(task: Task, data: FederatedData, settings: Settings) -> Engine:
    if task.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise PrefedError(
            'engine: "compiled" needs a C++ compiler (g++ or clang++) and none is installed; '
            'use "vectorised" or "auto"'
        )
    of_blocks = Compiled(task, data, settings)
    if of_blocks.most_clients > 1 and of_blocks.why_not() is None:
        return of_blocks
    if (reason := why_not(task)) is None:
        return CompiledAlone(task, data, settings)
    warnings.warn(
        f"the model cannot be compiled ({reason}); clients train one after another",
        EngineWarning,
        stacklevel=2,
    )
    return Sequential(task, data, settings)


def why_not(task: Task) -> str | None:
    """Why the steps of a single client cannot be compiled, as far as it is known before."""
    if task.randomness == "generator":
        return "it draws from torch's global generator"
    if task.precision != "float32":
        return "mixed precision"
    return None if task.micro_batch is None else "micro_batch, which is for models that are large"


def can_be(algorithm: Algorithm) -> bool:
    """The compiler can have its steps."""
    if algorithm.client_rule().other(0) is None:
        return True
    warnings.warn(
        f"{type(algorithm).__name__} needs more than one gradient in a step; its clients train "
        f"without a compiler",
        EngineWarning,
        stacklevel=3,
    )
    return False


class Compiled(Vectorised):
    """A block of clients."""

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        super().__init__(task, data, settings)
        self.steps = Steps(task.flat.layout, self._gradients())

    def again(self, task: Task, data: FederatedData, settings: Settings) -> "Compiled":
        """For another worker, with what is compiled already."""
        other = Compiled(task, data, settings)
        other.steps = self.steps
        return other

    def _gradients(self) -> Gradients:
        differentiate, direct = by_autograd(losses_of(self.task, skeleton(self.task.flat.module))), self.gradients

        def gradients(
            parameters: State, buffers: State, x: Inputs, y: Tensor, keys: Tensor
        ) -> tuple[State, Tensor]:
            if direct is None or self.direct_gradients(y) is None:
                return differentiate(parameters, buffers, x, y, keys)
            found = {name: torch.empty_like(value) for name, value in parameters.items()}
            return found, direct(parameters, found, x, y)

        return gradients

    def make_block(
        self, clients: Sequence[int], steps: list[int], stacks: list[Stack], seeds: list[int]
    ) -> VectorisedBlock:
        return CompiledBlock(self, clients, steps, stacks, seeds)


class CompiledBlock(VectorisedBlock):
    engine: Compiled

    @property
    def group(self) -> Group | None:
        """All clients, if their batches are alike and the compiler can have them."""
        only = self.stacks[0] if len(self.stacks) == 1 and not self.buffers else None
        return only if isinstance(only, Group) and self.engine.simple(only, only.y) else None

    def is_compiled(self, algorithm: Algorithm) -> bool:
        return not self.engine.steps.is_refused and can_be(algorithm) and self.group is not None

    def rule(self, algorithm: Algorithm) -> Rule:
        """The plain lines: it is the compiler that fuses them."""
        if not self.is_compiled(algorithm):
            return super().rule(algorithm)
        return algorithm.client_rule().fit(self.layout)

    def run_steps(self, algorithm: Algorithm, rule: Rule, state: State, lr: float) -> Tensor:
        if not self.is_compiled(algorithm) or (group := self.group) is None:
            return super().run_steps(algorithm, rule, state, lr)
        steps, chain = self.steps[0], self.engine.direct_gradients(group.y) is not None
        together = max(MOST, -(-steps // PARTS)) if chain else 1
        losses, rate = self.weights.new_zeros(len(self.clients)), self.weights.new_full((), lr)
        for first in range(0, steps, together):
            numbers = range(first, min(first + together, steps))
            found = self.engine.steps(
                (len(self.clients), batch.kind(group.x), len(numbers)),
                algorithm, rule, self.weights, self.shares, state, {},
                [self._step(group, k) for k in numbers], rate, first,
            )  # fmt: skip
            if found is not None:
                losses += found
                continue
            for k in numbers:
                losses += self.differentiate(k)
                local_step(algorithm, rule, self, state, lr, k)
        return losses

    def _step(self, group: Group, k: int) -> Step:
        x, y = group.batch(k)
        device = self.engine.task.device
        return batch.moved(x, device), y.to(device), self.keys(k)


class CompiledAlone(Sequential):
    """One client after another; one graph for all of them."""

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        super().__init__(task, data, settings)
        loss = one_client(task, skeleton(task.flat.module))
        self.steps = Steps(task.flat.layout, by_autograd(of_one_row(loss)))

    def again(self, task: Task, data: FederatedData, settings: Settings) -> "CompiledAlone":
        other = CompiledAlone(task, data, settings)
        other.steps = self.steps
        return other

    def make_block(self, clients: Sequence[int], server: Server) -> SequentialBlock:
        return CompiledClient(self, clients, server)


class CompiledClient(SequentialBlock):
    engine: CompiledAlone

    def is_compiled(self, algorithm: Algorithm) -> bool:
        return self.alone and not self.engine.steps.is_refused and can_be(algorithm)

    def rule(self, algorithm: Algorithm) -> Rule:
        if not self.is_compiled(algorithm):
            return super().rule(algorithm)
        return algorithm.client_rule().fit(self.layout)

    def run_steps(self, algorithm: Algorithm, rule: Rule, state: State, lr: float) -> Tensor:
        if not self.is_compiled(algorithm):
            return super().run_steps(algorithm, rule, state, lr)
        losses, rate = self.weights.new_zeros(1), self.weights.new_full((), lr)
        held = self.task.flat.buffers
        for k in range(self.steps[0]):
            x, y = self.batches[0][k]
            step = self.task.prepared(x), y.to(self.task.device), self.keys(k)
            buffers = {name: held[name] for name in held.changing}
            found = self.engine.steps(
                (batch.kind(x), len(y)), algorithm, rule, self.weights, self.shares, state,
                buffers, [step], rate, k,
            )  # fmt: skip
            if found is None:
                found = self.differentiate(k)
                local_step(algorithm, rule, self, state, lr, k)
            losses += found
        return losses


def by_autograd(losses_of: Losses) -> Gradients:
    """The gradients of the clients' losses: their sum depends on the weights of a client through
    its own loss alone."""

    def total(
        parameters: State, buffers: State, x: Inputs, y: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = losses_of(parameters, buffers, x, y, keys)
        return losses.sum(), losses

    gradients: Gradients = torch.func.grad(total, has_aux=True)
    return gradients


def of_one_row(loss: Losses) -> Losses:
    """For a block of one client: its rows are looked at as they are, where vmap would make other
    operations of them."""

    def losses(parameters: State, buffers: State, x: Inputs, y: Tensor, keys: Tensor) -> Tensor:
        own = {name: value[0] for name, value in parameters.items()}
        return loss(own, buffers, x, y, keys[0]).unsqueeze(0)

    return losses
