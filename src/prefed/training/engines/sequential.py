"""One client after another, on one instance of the model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import batch
from prefed.core.losses import shares
from prefed.core.parts import timed
from prefed.data import FederatedData
from prefed.rules import Field
from prefed.rules.rule import Other
from prefed.training.batches import Batches
from prefed.training.block import Block
from prefed.training.engines.engine import ENGINES
from prefed.training.keyed_dropout import keys
from prefed.training.other_gradients import SEEDS, loss_of_drawn, numbers, pieces
from prefed.training.round import Update, local_update
from prefed.training.server_state import Kept, Server
from prefed.training.settings import Settings
from prefed.training.task import Task


@ENGINES.register("sequential")
class Sequential:
    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        self.task, self.data, self.settings = task, data, settings
        self.workspaces: dict[tuple[str, int], Tensor] = {}

    def block_size(self, algorithm: Algorithm, cohort: int) -> int:
        return 1

    def update(
        self, algorithm: Algorithm, server: Server, clients: Sequence[int], kept: Kept
    ) -> Update:
        self.task.begin_training()
        block = self.make_block(clients, server)
        update = local_update(algorithm, server, block, kept)
        self.task.flat.buffers.check()
        return update

    def make_block(self, clients: Sequence[int], server: Server) -> "SequentialBlock":
        return SequentialBlock(self, clients, server)


class SequentialBlock(Block):
    """One client whose weights are the model's own; or, in lockstep, the rows of a cohort, which
    take turns in the model."""

    def __init__(self, engine: Sequential, clients: Sequence[int], server: Server) -> None:
        round, limits = server.round, server.limits
        self.engine, self.clients, self.round = engine, clients, round
        self.task, self.layout = engine.task, engine.task.flat.layout
        flat = self.task.flat
        self.alone = len(clients) == 1
        rows = (len(clients), self.layout.size)
        self.weights = flat.weights[None] if self.alone else flat.weights.new_empty(rows)
        self.gradient = flat.gradient[None] if self.alone else flat.weights.new_empty(rows)
        self.samples = samples = [engine.data.client(c) for c in clients]
        about = engine.settings, engine.data.augment, self.task.device
        self.batches = [
            Batches(s, c, round, *about, limits.get(c))
            for s, c in zip(samples, clients, strict=True)
        ]
        self.steps = [len(batches) for batches in self.batches]
        self.seed = engine.settings.seed
        self.seeds = self.task.seeds(self.seed, round, clients)
        weight = engine.settings.weight
        shares = [weight(c, len(s)) for c, s in zip(clients, samples, strict=True)]
        self.shares = self.weights.new_tensor(shares) / sum(shares)

    @timed("forward and backward")
    def differentiate(self, k: int) -> Tensor:
        flat, losses = self.task.flat, []
        for row, batches in enumerate(self.batches):
            if not self.alone:
                flat.weights.copy_(self.weights[row])
                flat.write_buffers(self.buffers[row], self.behind[row] + k)
            losses.append(self.task.gradient(*batches[k], self.seeds[row] + k))
            if not self.alone:
                self.gradient[row].copy_(flat.gradient)
                self.buffers[row].copy_(flat.read_buffers())
        return torch.stack(losses)

    def keys(self, k: int) -> Tensor:
        """Of dropout in step k (C, 2)."""
        return keys([seed + k for seed in self.seeds], self.task.device)

    def other_gradient(self, kind: Other, k: int) -> Tensor:
        task, engine, (samples,) = self.task, self.engine, self.samples
        before, found = task.flat.read_buffers(), torch.zeros_like(self.weights)
        seed = self.seeds[0] + SEEDS + k
        if kind == "whole":
            x, y = map(batch.padded, samples.all())
            cut = pieces(len(y))
            for n, share in enumerate(shares(task.loss, [y[piece] for piece in cut])):
                if share:
                    task.gradient(batch.part(x, cut[n]), y[cut[n]], seed + n)
                    found.add_(task.flat.gradient, alpha=share)
        else:
            x, y = self.batches[0][k]
            u = numbers(engine.settings, self.round, self.clients, k, y[None])[0].to(task.device)
            task.gradient(x, y, seed, lambda output, y: loss_of_drawn(task.loss, output, y, u))
            found.copy_(task.flat.gradient)
        task.flat.write_buffers(before, self.behind[0] + k)
        return found

    def state(self, name: str, field: Field) -> Tensor:
        key = (name, len(self.clients))
        if key not in self.engine.workspaces:
            self.engine.workspaces[key] = field.new(self.weights, len(self.clients))
        return self.engine.workspaces[key]

    def read_buffers(self) -> Tensor:
        return self.task.flat.read_buffers()[None] if self.alone else self.buffers

    def write_buffers(self, buffers: Tensor, steps: Tensor) -> None:
        self.buffers, self.behind = buffers, steps
        if self.alone:
            self.task.flat.write_buffers(buffers[0], steps[0])

    def cohort_mean(self, rows: Tensor) -> Tensor:
        return self.shares @ rows
