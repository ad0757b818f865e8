"""A block of clients at once: weights (C, d), rules on (C, d) as they are.

Ordinary autograd gives every client's gradient: the sum of the clients' losses depends on the
weights of a client through its own loss alone.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from prefed.algorithms import Algorithm
from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.losses import WITH_CLASSES, are_labels, ignored_label, shares
from prefed.core.machine import total_memory
from prefed.core.parts import timed
from prefed.data import FederatedData
from prefed.rules import Field
from prefed.rules.rule import Other
from prefed.training.batches import local_steps
from prefed.training.block import Block
from prefed.training.engines.block_losses import Each, Losses, by_vmap, gradients_of, losses_of
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.engines.linear_chains import Differentiate
from prefed.training.engines.sequential import Sequential
from prefed.training.engines.stacked_batches import Group, Stack, gather, whole_batches
from prefed.training.keyed_dropout import keys
from prefed.training.other_gradients import SEEDS, loss_of_drawn, numbers, pieces
from prefed.training.round import Update, local_update
from prefed.training.server_state import Kept, Server
from prefed.training.settings import Settings
from prefed.training.task import Task

CACHE_SIZE = 1 << 19
"""The largest number of weights in a block (clients times d) that stays in a CPU's cache."""
MEMORY_PER_WEIGHTS = 12
"""An upper bound: the memory of a block (gradients, state, activations) over its weights'."""
MEMORY_PER_STATE = 8
"""An upper bound: the memory that a rule needs to work on its state, over that of the state."""
BLOCKS_MULTIPLE = 2
"""The number of blocks of a large cohort is a multiple of this, so that workers can share them."""
Rows = slice | Tensor
"""Of a block."""
SMALLEST_BLOCK = 8
"""Clients in a block; smaller ones cost more than a second worker gains."""


def or_sequential(engine: "Vectorised") -> Engine:
    """The engine, or the sequential one for models that vmap cannot run."""
    if (reason := engine.why_not()) is None:
        return engine
    warnings.warn(
        f"the model cannot be vectorised ({reason}); clients train one after another",
        EngineWarning,
        stacklevel=3,
    )
    return Sequential(engine.task, engine.data, engine.settings)


@ENGINES.register("vectorised")
def vectorised(task: Task, data: FederatedData, settings: Settings) -> Engine:
    return or_sequential(Vectorised(task, data, settings))


class Vectorised:
    way = "vmap"
    """What gradients are computed by."""
    each: Each = staticmethod(vmap)

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        self.task, self.data, self.settings = task, data, settings
        self.losses = losses_of(task, each=self.each)
        self.any_losses = by_vmap(task, each=self.each)
        self.losses_of_drawn = by_vmap(
            task, lambda output, given: loss_of_drawn(task.loss, output, *given), each=self.each
        )
        self.gradients = gradients_of(task)
        self.workspaces: dict[tuple[str, int], Tensor] = {}

    def block_size(self, algorithm: Algorithm, cohort: int) -> int:
        blocks = math.ceil(cohort / min(self.most_clients, self.most_clients_by_state(algorithm)))
        if cohort >= BLOCKS_MULTIPLE * SMALLEST_BLOCK:
            blocks = BLOCKS_MULTIPLE * math.ceil(blocks / BLOCKS_MULTIPLE)
        return math.ceil(cohort / blocks)

    @cached_property
    def most_clients(self) -> int:
        """How many clients fit into the cache of a CPU, and into a quarter of the memory of any
        device."""
        weights = self.task.flat.weights
        fit = total_memory(weights.device) // (4 * MEMORY_PER_WEIGHTS * weights.nbytes)
        return max(1, min(fit, CACHE_SIZE // len(weights) if weights.device.type == "cpu" else fit))

    def together(self, clients: int) -> int:
        """How many clients of a block have their batches stacked together."""
        return self.most_clients

    def most_clients_by_state(self, algorithm: Algorithm) -> int:
        """How many clients have a state that can be worked on in a quarter of the memory. It may be
        far larger than their weights: a covariance matrix is."""
        flat = self.task.flat
        fields = algorithm.client_rule().fields(flat.layout).values()
        numbers = sum(math.prod(field.shape) for field in fields)
        needed = 4 * MEMORY_PER_STATE * max(1, numbers) * flat.weights.itemsize
        return max(1, total_memory(flat.weights.device) // needed)

    def simple(self, stack: Stack, y: Tensor) -> bool:
        """Every target counts in the loss, as the fast ways have it; vmap knows better. Labels
        are looked at only where some may be of no class: on a GPU everybody would wait for it."""
        loss = self.task.loss
        return loss not in WITH_CLASSES or ignored_label(loss) is None or not stack.ignores(y)

    def direct_gradients(self, y: Tensor) -> Differentiate | None:
        """Gradients without autograd, if there is a way for such targets."""
        return self.gradients if y.dim() == 2 and are_labels(y) else None

    def update(
        self, algorithm: Algorithm, server: Server, clients: Sequence[int], kept: Kept
    ) -> Update:
        self.task.begin_training()
        data = self.data.at_hand()
        steps = local_steps(self.settings, data, clients, server.limits)
        order = sorted(range(len(clients)), key=lambda row: -steps[row])  # as a block wants them
        clients, steps = [clients[row] for row in order], [steps[row] for row in order]
        seeds = self.task.seeds(self.settings.seed, server.round, clients)
        how = self.settings, self.together(len(clients)), self.task.device
        stacks = gather(data, clients, server.round, *how, server.limits)
        block = self.make_block(clients, steps, stacks, seeds)
        block.round, block.data = server.round, data
        update = local_update(algorithm, server, block, kept)
        self.task.flat.buffers.check()
        return update.in_order(order)

    def why_not(self) -> str | None:
        """Why this engine cannot train the model: one gradient is compared with autograd's."""
        task, flat = self.task, self.task.flat
        if task.randomness == "generator":
            return "it draws from torch's global generator"
        if task.precision != "float32":
            return "mixed precision"
        if task.micro_batch is not None:
            return "micro_batch, which is for models that are large"
        samples, training, buffers = self.data.client(0), flat.module.training, flat.read_buffers()
        zero = torch.zeros(2, dtype=torch.int64)  # steps
        x, y = map(batch.padded, samples.take(torch.arange(4) % len(samples)))
        try:
            flat.module.train()
            task.gradient(x, y, seed=0)
            expected = torch.cat([flat.gradient, flat.read_buffers()])
            flat.write_buffers(buffers, zero[0])
            pair = Group(slice(0, 2), batch.stacked([x, x]), torch.stack([y, y]))
            block = self.make_block([0, 0], [1, 1], [pair], [0, 0])
            block.weights.copy_(flat.weights)
            block.write_buffers(buffers.expand(2, -1), zero)
            block.differentiate(0)
            found = torch.cat([block.gradient[1], block.read_buffers()[1]])
        except Exception as error:  # vmap has many ways to say that it does not know an operation
            return str(error).strip().partition("\n")[0].rstrip(".")
        finally:
            flat.module.train(training)
            flat.write_buffers(buffers, zero[0])
        off, scale = float((found - expected).abs().max()), float(expected.abs().max())
        tolerance = 1e-8 if found.dtype == torch.float64 else 1e-2
        return (
            None if off <= tolerance * scale else f"{self.way} gives other gradients than autograd"
        )

    def make_block(
        self, clients: Sequence[int], steps: list[int], stacks: list[Stack], seeds: list[int]
    ) -> "VectorisedBlock":
        return VectorisedBlock(self, clients, steps, stacks, seeds)

    def workspace(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """An uninitialised tensor (C, ...) that is reused from block to block and round to
        round."""
        key = (name, shape[0])
        if key not in self.workspaces:
            weights = self.task.flat.weights
            self.workspaces[key] = weights.new_empty(shape, dtype=dtype or weights.dtype)
        return self.workspaces[key]


class VectorisedBlock(Block):
    round = 0

    def __init__(
        self,
        engine: Vectorised,
        clients: Sequence[int],
        steps: list[int],
        stacks: list[Stack],
        seeds: list[int],
    ) -> None:
        self.engine, self.clients, self.steps = engine, clients, steps
        self.stacks, self.seeds, self.seed = stacks, seeds, engine.settings.seed
        self.data = engine.data
        flat = engine.task.flat
        self.layout = flat.layout
        shape = (len(clients), self.layout.size)
        self.weights = engine.workspace("weights", shape)
        self.gradient = engine.workspace("gradient", shape)
        self.buffers = {
            name: (buffer := flat.buffers[name]).expand(len(clients), *buffer.shape).clone()
            for name in flat.buffers.changing
        }

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        return self.layout.views(self.weights)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        return self.layout.views(self.gradient)

    def keys(self, k: int) -> Tensor:
        """Of dropout in step k; if nothing is drawn, anything."""
        if self.engine.task.randomness == "none":
            return self.no_keys
        return keys([seed + k for seed in self.seeds], self.engine.task.device)

    @cached_property
    def no_keys(self) -> Tensor:
        return self.weights.new_zeros((len(self.clients), 2), dtype=torch.int32)

    def batches(self, k: int) -> Iterator[tuple[Stack, Rows, Inputs, Tensor]]:
        """Of step k, with the rows that they are of."""
        for stack in self.stacks:
            for part in stack.batches(k):
                yield stack, *part

    @timed("forward and backward")
    def differentiate(self, k: int) -> Tensor:
        key, losses = self.keys(k), self.weights.new_empty(len(self.clients))
        for stack, rows, x, y in self.batches(k):
            losses[rows] = self._fill(stack, rows, x, y, key)
        return losses

    def _fill(self, stack: Stack, rows: Rows, x: Inputs, y: Tensor, key: Tensor) -> Tensor:
        """The gradients of some rows on their batches; their losses."""
        task = self.engine.task
        x, y = batch.moved(x, task.device), y.to(task.device)
        simple = self.engine.simple(stack, y)
        direct = self.engine.direct_gradients(y) if simple else None
        if direct is None:
            losses_of = self.engine.losses if simple else self.engine.any_losses
            return self._by_autograd(losses_of, rows, x, y, key)
        weights = {n: v[rows] for n, v in self.parameters.items()}
        gradients = {n: v[rows] for n, v in self.gradients.items()}
        losses = direct(weights, gradients, x, y)
        if not isinstance(rows, slice):  # they were copied
            for n, gradient in gradients.items():
                self.gradients[n][rows] = gradient
        return losses

    def _by_autograd(self, losses_of: Losses, rows: Rows, x: Inputs, y: Any, key: Tensor) -> Tensor:
        leaves = {n: p[rows].detach().requires_grad_() for n, p in self.parameters.items()}
        buffers = {n: b[rows] for n, b in self.buffers.items()}
        loss = losses_of(leaves, buffers, x, y, key[rows])
        found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        for gradient, value in zip(self.gradients.values(), found, strict=True):
            gradient[rows] = 0 if value is None else value
        for name, buffer in buffers.items():
            self.buffers[name][rows] = buffer
        return loss.detach()

    def other_gradient(self, kind: Other, k: int) -> Tensor:
        engine, found = self.engine, torch.zeros_like(self.weights)
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        if kind == "whole":
            device, most = engine.task.device, engine.most_clients
            for group in whole_batches(self.data, self.clients, most, device):
                cut = pieces(group.y.shape[1])
                each = [shares(engine.task.loss, [y[piece] for piece in cut]) for y in group.y]
                share = self.weights.new_tensor(each)
                for n, piece in enumerate(cut):
                    y = group.y[:, piece]
                    x = batch.mapped(itemgetter((slice(None), piece)), group.x)
                    self._fill(group, group.rows, x, y, self.keys(SEEDS + k + n))
                    own, part = share[:, n : n + 1], self.gradient[group.rows]
                    found[group.rows] += torch.where(own != 0, part * own, 0)  # else it may be NaN
        else:
            for _, rows, x, y in self.batches(k):
                x, y = batch.moved(x, engine.task.device), y.to(engine.task.device)
                places = torch.arange(len(self.clients))[rows].tolist()
                clients = [self.clients[place] for place in places]
                u = numbers(engine.settings, self.round, clients, k, y)
                self._by_autograd(engine.losses_of_drawn, rows, x, (y, u), self.keys(SEEDS + k))
                found[rows] = self.gradient[rows]
        for name, buffer in before.items():
            self.buffers[name].copy_(buffer)
        return found

    def state(self, name: str, field: Field) -> Tensor:
        shape = (len(self.clients), *field.shape)
        return self.engine.workspace(f"state.{name}", shape, field.dtype)

    def read_buffers(self) -> Tensor:
        buffers = self.engine.task.flat.buffers
        found = self.weights.new_empty(len(self.clients), buffers.layout.size, dtype=buffers.dtype)
        for name, part in buffers.layout.views(found).items():
            part.copy_(self.buffers[name])
        return found

    def write_buffers(self, buffers: Tensor, steps: Tensor) -> None:
        for name, value in self.engine.task.flat.buffers.values(buffers, steps).items():
            self.buffers[name].copy_(value)

    @cached_property
    def shares(self) -> Tensor:
        """The weight of each client in the mean over the block."""
        weights = self.engine.settings.weights(self.clients, self.data.size)
        shares = self.weights.new_tensor(weights)
        return shares / shares.sum()

    def cohort_mean(self, rows: Tensor) -> Tensor:
        return self.shares @ rows
