"""What a run minimises, measured at the global model, and how far it lies above its minimum."""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev

from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.errors import PrefedError
from prefed.core.losses import tensor_of
from prefed.core.machine import torch_threads
from prefed.training.task import Task
from prefed.training.trainer import Record

if TYPE_CHECKING:
    from prefed.training.run import Run

MOST_WEIGHTS = 2000
"""Of a model whose minimum is looked for: the Hessian has as many rows and columns."""
STEPS = 100
"""Of Newton's method, at most."""
NEAR = 1e-15
"""The search ends where one more step would gain less than this."""


class TrainingObjective:
    """F(w): the mean loss of all samples of each client, in the mean over clients that the run
    takes, and weight_decay / 2 |w|^2. All of it in float64, whatever the run's own precision: near
    the minimum two values differ by far less than they are."""

    def __init__(self, run: "Run") -> None:
        _check(run)
        self.run, self.decay = run, run.algorithm.weight_decay
        task = run.task
        self.task = Task(task.model().double(), task.loss, run.data, task.device)
        self.task.numbers_out, given = task.numbers_out, task.transform
        self.task.transform = lambda x: batch.mapped(_double, given(x) if given else x)
        self.minimum: float | None = None
        if run.settings.objective == "gap":
            self.minimum = self._minimum()

    def evaluate(self) -> Record:
        """At the global model, for the record of a round."""
        self.task.flat.module.load_state_dict(self.run.model().state_dict())
        with torch_threads(1):
            value = self._value()
        found: Record = {"objective": value}
        return found if self.minimum is None else found | {"objective_gap": value - self.minimum}

    def _clients(self) -> Iterator[tuple[float, Inputs, Tensor]]:
        """The share of each client in the mean, and its samples."""
        data, weight = self.run.data, self.run.settings.weight
        sizes = [len(data.client(client)) for client in range(len(data))]
        weights = [weight(client, size) for client, size in enumerate(sizes)]
        for client, own in enumerate(weights):
            yield own / sum(weights), *data.client(client).all()

    def _value(self) -> float:
        losses = sum(share * self.task.evaluate(x, y)[0] for share, x, y in self._clients())
        w = self.task.flat.weights
        return losses + self.decay / 2 * float(w @ w)

    def _minimum(self) -> float:
        """Newton's method with halved steps, from the model's first weights."""
        w = self.task.flat.weights
        with torch_threads(1):
            value = self._value()
            for _ in range(STEPS):
                gradient, curvature = self._derivatives(w)
                step, error = torch.linalg.solve_ex(curvature, gradient)
                gain = float(gradient @ step)
                if int(error) or not gain >= 0:
                    break
                if gain / 2 <= NEAR:
                    return value
                start, size = w.clone(), 1.0
                while size > 1e-10:
                    torch.sub(start, step, alpha=size, out=w)
                    if (lower := self._value()) < value:
                        break
                    size /= 2
                else:  # rounding: as low as float64 can tell
                    w.copy_(start)
                    if gain < 1e-12:
                        return value
                    break
                value = lower
        raise PrefedError(
            'objective: Newton\'s method finds no minimum, so there is no "gap"; it is for convex '
            'losses of linear models, with weight_decay above 0. Set objective = "value"'
        )

    def _derivatives(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian at w."""
        d = len(w)
        first = self.decay * w
        second = self.decay * torch.eye(d, dtype=w.dtype, device=w.device)
        for share, x, y in self._clients():
            x = self.task.transform(batch.moved(batch.padded(x), w.device))  # type: ignore[misc]
            y = batch.padded(y).to(w.device)

            def loss(w: Tensor, x: Inputs = x, y: Tensor = y) -> Tensor:
                output = functional_call(self.task.flat.module, self._named(w), (x,))
                return self.task.loss(tensor_of(output), y)

            first = first + share * grad(loss)(w)
            second += share * jacrev(grad(loss))(w)
        return first, second

    def _named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters in w, by name."""
        entries = self.task.flat.layout.entries
        return {e.name: w[e.offset : e.offset + prod(e.shape)].reshape(e.shape) for e in entries}


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _check(run: "Run") -> None:
    settings, algorithm = run.settings, run.algorithm
    if not run.trainer.simulates:
        raise PrefedError("objective: needs all clients' samples, which are on nodes; leave it out")
    if settings.privacy is not None:
        raise PrefedError("objective: would tell of clients' samples without noise; leave it out")
    for name in ("personal", "groups"):
        if getattr(algorithm, name):
            raise PrefedError(
                f"objective: is that of one model with one weight_decay; leave out {name}, or this"
            )
    if settings.objective == "gap" and len(run.task.flat.weights) > MOST_WEIGHTS:
        raise PrefedError(
            f'objective: "gap" is for models of up to {MOST_WEIGHTS} weights, and there are '
            f'{len(run.task.flat.weights)}; set objective = "value"'
        )
