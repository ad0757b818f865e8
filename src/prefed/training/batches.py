"""The batches of one client in one round. Every engine takes them from here, so that they are the
same in all of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefed.core import draws
from prefed.data.federated import Augment
from prefed.data.samples import Samples
from prefed.training.settings import Settings

DRAWS = {"replacement": draws.batches, "epochs": draws.epochs}


def sample_numbers(
    settings: Settings, round: int, clients: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Which of their samples these clients use, one local step's after another (C, steps x batch
    size). Not for the full batch."""
    assert settings.batch_size is not None
    draw, count = DRAWS[settings.batches], settings.local_steps * settings.batch_size
    drawn = np.empty((len(clients), count), np.int64)
    for row, client, samples in zip(drawn, clients, sizes, strict=True):
        row[:] = draw(settings.seed, round, client, samples, count)
    return torch.from_numpy(drawn)


def augmented(
    augment: Augment, x: Tensor, settings: Settings, round: int, client: int, step: int
) -> Tensor:
    """The batch of a step with its random changes, which depend on this key alone."""
    return augment(x, draws.generator(settings.seed, "augment", round, client, step))


class Batches:
    """batches[k] is (x, y) of step k, on the device; they are gathered once, at the start."""

    def __init__(
        self,
        samples: Samples,
        client: int,
        round: int,
        settings: Settings,
        augment: Augment | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.client, self.round, self.settings, self.augment = client, round, settings, augment
        if settings.batch_size is None:
            self.x, self.y = samples.all()
        else:
            self.x, self.y = samples.take(
                sample_numbers(settings, round, [client], [len(samples)])[0]
            )
        if device is not None:
            self.x, self.y = self.x.to(device), self.y.to(device)

    def part(self, k: int) -> slice:
        """Where the batch of step k lies in x and y."""
        size = self.settings.batch_size
        return slice(None) if size is None else slice(k * size, (k + 1) * size)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        part = self.part(k)
        x, y = self.x[part], self.y[part]
        if self.augment is not None:
            x = augmented(self.augment, x, self.settings, self.round, self.client, k)
        return x, y
