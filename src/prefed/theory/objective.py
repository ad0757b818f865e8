"""The functions F_i of the clients and their mean F, of flat weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from prefed.core import draws
from prefed.data import FederatedData
from prefed.training.run import Run
from prefed.training.settings import Settings
from prefed.training.task import Task

Tick = Callable[[str], None]
"""Called with a few words when a piece of the work is done."""


def silent(text: str) -> None:
    """A tick that nobody hears."""


class Objective:
    """F_i(w) is the loss of all samples of client i, F the mean over clients, weighted as the run
    weights them. The model is in evaluation mode: dropout and running statistics stand still."""

    def __init__(self, task: Task, data: FederatedData, settings: Settings) -> None:
        self.task, self.data, self.settings = task.copy(data), data, settings
        self.flat = self.task.flat
        self.flat.module.eval()
        self.start = self.flat.weights.clone()
        self.d = len(self.start)

    @classmethod
    def of(cls, run: Run) -> "Objective":
        return cls(run.task, run.data, run.settings)

    @property
    def clients(self) -> int:
        return len(self.data)

    def some_clients(self, most: int) -> list[int]:
        """All clients, or `most` of them drawn at random."""
        size = min(most, self.clients)
        return draws.cohort(self.settings.seed, 0, self.clients, size)

    def shares(self, clients: Sequence[int]) -> Tensor:
        weights = [self.settings.weight(c, len(self.data.client(c))) for c in clients]
        return self.start.new_tensor(weights) / sum(weights)

    def gradient(self, w: Tensor, client: int, index: Tensor | None = None) -> tuple[float, Tensor]:
        """Loss and gradient of a client, on all its samples or on those that are named."""
        samples = self.data.client(client)
        self.flat.weights.copy_(w)
        x, y = samples.all() if index is None else samples.take(index)
        loss = self.task.gradient(x, y, seed=0)
        return float(loss), self.flat.gradient.clone()

    def gradients(self, w: Tensor, clients: Sequence[int]) -> Tensor:
        """The clients' gradients (n, d)."""
        return torch.stack([self.gradient(w, client)[1] for client in clients])

    def value_and_gradient(self, w: Tensor, clients: Sequence[int]) -> tuple[float, Tensor]:
        """F and its gradient, over these clients."""
        value, total = 0.0, torch.zeros_like(w)
        for client, share in zip(clients, self.shares(clients).tolist(), strict=True):
            loss, gradient = self.gradient(w, client)
            value += share * loss
            total.add_(gradient, alpha=share)
        return value, total

    def batch_gradients(self, w: Tensor, client: int, batches: int, draw: int) -> Tensor:
        """Stochastic gradients as the run draws them (n, d), from batches that no run uses."""
        size, samples = self.settings.batch_size, len(self.data.client(client))
        if size is None:
            return self.gradient(w, client)[1].expand(batches, -1)
        generator = draws.generator(self.settings.seed, "theory", draw, client)
        index = torch.from_numpy(generator.integers(samples, size=(batches, size)))
        return torch.stack([self.gradient(w, client, row)[1] for row in index])

    @contextmanager
    def hessian(self, w: Tensor, client: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """v -> H_i(w) v, by differentiating twice; the first derivative is taken once."""
        x, y = self.data.client(client).all()
        self.flat.weights.copy_(w)
        named = [(n, p) for n, p in self.flat.module.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        with torch.enable_grad():
            loss = self.task.loss(self.task.forward(x), y.to(self.task.device))
            first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)

        def product(v: Tensor) -> Tensor:
            directions = self.flat.layout.views(v)
            pairs = [
                (g, directions[name])
                for (name, _), g in zip(named, first, strict=True)
                if g is not None and g.requires_grad
            ]
            result = torch.zeros_like(v)
            if not pairs:  # a linear function has no curvature
                return result
            found = torch.autograd.grad(
                [g for g, _ in pairs], parameters, [u for _, u in pairs],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            for (name, _), h in zip(named, found, strict=True):
                if h is not None:
                    self.flat.layout.views(result)[name].copy_(h)
            return result

        yield product
