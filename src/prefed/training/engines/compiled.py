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
from prefed.core.schedule import within
from prefed.data import FederatedData
from prefed.rules import Rule, State
from prefed.rules.fitted import Fitted
from prefed.training.block import local_step
from prefed.training.engines.block_losses import Losses, losses_of, one_client
from prefed.training.engines.compiled_steps import Gradients, Refused, Step, Steps, skeleton
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.engines.sequential import Sequential, SequentialBlock
from prefed.training.engines.stacked_batches import Alike, Stack
from prefed.training.engines.vectorised import SMALLEST_BLOCK, Vectorised, VectorisedBlock
from prefed.training.round import Update
from prefed.training.server_state import Kept, Server
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
    if of_blocks.most_clients >= SMALLEST_BLOCK and of_blocks.why_not() is None:
        return of_blocks
    if (reason := why_not(task, data)) is None:
        return CompiledAlone(task, data, settings)
    warnings.warn(
        f"the model cannot be compiled ({reason}); clients train one after another",
        EngineWarning,
        stacklevel=2,
    )
    return Sequential(task, data, settings)


def usual_batch(data: FederatedData, settings: Settings) -> int:
    """The samples of a batch that steps are compiled for: others of a run are few, and run as they
    are. It must not depend on what came before, or a resumed run would have other bits."""
    return settings.batch_size or len(data.client(0))


def why_not(task: Task, data: FederatedData) -> str | None:
    """Why the steps of a single client cannot be compiled, as far as it is known before."""
    if data.client(0).is_ragged:
        return "samples are of unequal length"
    if task.randomness == "generator":
        return "it draws from torch's global generator"
    if task.precision != "float32":
        return "mixed precision"
    return None if task.micro_batch is None else "micro_batch, which is for models that are large"


def can_be(algorithm: Algorithm) -> bool:
    """The compiler can have its steps; if not, a line says why."""
    rule = algorithm.client_rule()
    if rule.other(0) is not None:
        reason = f"{type(algorithm).__name__} needs more than one gradient in a step"
    elif isinstance(rule, Fitted):
        reason = f"{type(algorithm).__name__} has steps of whole matrices"
    elif rule.elementwise and not rule.in_parts:
        reason = (
            "with tau_relative: torch's compiler fails where a step needs a mean of all weights"
        )
    elif algorithm.state_dtype != "weights":
        reason = "with state_dtype the random numbers of a step come from NumPy"
    elif within(algorithm.client_lr, 0) is not None:
        reason = "client_lr rises from step to step, and each would have to be compiled"
    else:
        return True
    warnings.warn(f"not compiled: {reason}", EngineWarning, stacklevel=3)
    return False


class Compiled(Vectorised):
    """A block of clients."""

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        super().__init__(task, data, settings)
        self.steps = Steps(task.flat.layout, self._gradients())

    def update(
        self, algorithm: Algorithm, server: Server, clients: Sequence[int], kept: Kept
    ) -> Update:
        try:
            return super().update(algorithm, server, clients, kept)
        except Refused:  # from the start, so that a run has the bits of the vectorised engine
            return super().update(algorithm, server, clients, kept)

    def sizes(self, algorithm: Algorithm) -> set[int]:
        """Of the blocks that are compiled: those of a whole cohort. Others, where clients were
        lost, train without."""
        cohort = self.settings.clients_per_round or len(self.data)
        if algorithm.client_rule().lockstep:
            return {cohort}
        size = self.block_size(algorithm, cohort)
        return {size, cohort % size}

    def again(self, task: Task, data: FederatedData, settings: Settings) -> "Compiled":
        """For another worker, with what is compiled already."""
        other = Compiled(task, data, settings)
        other.steps = self.steps
        return other

    def _gradients(self) -> Gradients:
        differentiate, direct = (
            by_autograd(losses_of(self.task, skeleton(self.task.flat.module))),
            self.gradients,
        )

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
    def group(self) -> Alike | None:
        """All clients, if their batches are alike and the compiler can have them."""
        only = self.stacks[0] if len(self.stacks) == 1 and not self.buffers else None
        return only if isinstance(only, Alike) and self.engine.simple(only, only.y) else None

    def is_compiled(self, algorithm: Algorithm) -> bool:
        if self.engine.steps.is_refused or not can_be(algorithm) or (group := self.group) is None:
            return False
        usual = len(self.clients) in self.engine.sizes(algorithm)
        size, first = group.size, usual_batch(self.engine.data, self.engine.settings)
        return usual and (group.y.shape[1] if size is None else size) == first

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
            losses += self.engine.steps(
                (len(self.clients), len(numbers)), algorithm, rule, self.weights, self.shares,
                state, {}, [self._step(group, k) for k in numbers], rate, numbers,
            )  # fmt: skip
        return losses

    def _step(self, group: Alike, k: int) -> Step:
        x, y = group.batch(k)
        device = self.engine.task.device
        return batch.moved(x, device), y.to(device), self.keys(k)


class CompiledAlone(Sequential):
    """One client after another; one graph for all of them."""

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        super().__init__(task, data, settings)
        loss = one_client(task, skeleton(task.flat.module))
        self.steps = Steps(task.flat.layout, by_autograd(of_one_row(loss)))

        self.batch_size = usual_batch(data, settings)

    def update(
        self, algorithm: Algorithm, server: Server, clients: Sequence[int], kept: Kept
    ) -> Update:
        try:
            return super().update(algorithm, server, clients, kept)
        except Refused:  # from the start, so that a run has the bits of the sequential engine
            return super().update(algorithm, server, clients, kept)

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
            if len(y) != self.engine.batch_size:  # the last of a pass
                losses += self.differentiate(k)
                local_step(algorithm, rule, self, state, lr, k)
                continue
            step = self.task.prepared(x), y.to(self.task.device), self.keys(k)
            buffers = {name: held[name] for name in held.changing}
            losses += self.engine.steps(
                1, algorithm, rule, self.weights, self.shares, state, buffers, [step], rate, [k]
            )
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
