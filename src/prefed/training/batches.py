"""The batches of one client in one round. Every engine takes them from here, so that they are the
same in all of them."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from prefed.core import batch, draws
from prefed.core.batch import Inputs
from prefed.core.parts import timed
from prefed.data.federated import Augment, FederatedData
from prefed.data.samples import LazySamples, Samples
from prefed.training.settings import Settings

DRAWS = {"replacement": draws.batches, "epochs": draws.epochs}

TOGETHER = 1 << 24
"""Numbers in the inputs that are gathered at a time: 64 MB of float32."""

NO_LIMITS: Mapping[int, int] = MappingProxyType({})
"""Every client takes all its local steps (see Server.limits)."""


def local_steps(
    settings: Settings,
    data: FederatedData,
    clients: Sequence[int],
    limits: Mapping[int, int] = NO_LIMITS,
) -> list[int]:
    """Of each of these clients. What is made on demand is not made for it, if all take the same."""
    if settings.local_steps is not None:
        found = [settings.local_steps] * len(clients)
    else:
        found = [settings.steps(data.size(client)) for client in clients]
    return [min(k, limits.get(c, k)) for c, k in zip(clients, found, strict=True)]


def parts(settings: Settings, samples: int) -> list[slice]:
    """Where the batch of each step lies among the samples that a client draws in a round."""
    size = settings.batch_size
    if size is None:
        return [slice(None)] * settings.steps(samples)
    if settings.local_epochs is None:
        return [slice(k * size, (k + 1) * size) for k in range(settings.steps(samples))]
    starts = range(0, samples, size)[: settings.steps(samples) // settings.local_epochs]
    return [
        slice(first + start, first + min(start + size, samples))
        for first in range(0, settings.local_epochs * samples, samples)
        for start in starts
    ]


def sample_numbers(settings: Settings, round: int, client: int, samples: int) -> draws.Numbers:
    """Which of its samples a client uses, where `parts` says. Not for the full batch."""
    assert settings.batch_size is not None
    count = (settings.local_epochs or 0) * samples or settings.steps(samples) * settings.batch_size
    return DRAWS[settings.batches](settings.seed, round, client, samples, count)


def sample_numbers_of(
    settings: Settings, round: int, clients: Sequence[int], sizes: Sequence[int]
) -> draws.Numbers:
    """`sample_numbers` of clients that use equally many, a row for each."""
    if settings.batches == "replacement" and settings.local_epochs is None:
        assert settings.batch_size is not None
        count = settings.steps(sizes[0]) * settings.batch_size
        return draws.batches_of(settings.seed, round, clients, sizes, count)
    each = zip(clients, sizes, strict=True)
    return np.stack([sample_numbers(settings, round, client, size) for client, size in each])


def augmented(
    augment: Augment, x: Inputs, settings: Settings, round: int, client: int, step: int
) -> Inputs:
    """The batch of a step with its random changes, which depend on this key alone."""
    return augment(x, draws.generator(settings.seed, "augment", round, client, step))


class Batches:
    """batches[k] is (x, y) of step k, on the device. They are gathered many at a time."""

    def __init__(
        self,
        samples: Samples,
        client: int,
        round: int,
        settings: Settings,
        augment: Augment | None = None,
        device: torch.device | None = None,
        limit: int | None = None,
    ) -> None:
        self.client, self.round, self.settings, self.augment = client, round, settings, augment
        self.samples, self.device = samples, device
        self.parts = parts(settings, len(samples))[:limit]
        self.steps = range(0)
        """The steps whose batches lie in x and y, from number `first` of the drawn samples on."""
        if settings.batch_size is not None:
            self.numbers = torch.from_numpy(sample_numbers(settings, round, client, len(samples)))

    def __len__(self) -> int:
        return len(self.parts)

    @timed("batches")
    def __getitem__(self, k: int) -> tuple[Inputs, Tensor]:
        if k not in self.steps:
            self._gather(k)
        part = self.parts[k]
        if part.stop is not None:
            part = slice(part.start - self.first, part.stop - self.first)
        x, y = (batch.padded(batch.part(values, part)) for values in (self.x, self.y))
        if self.augment is not None:
            if self.settings.batch_size is None:  # the client's own, which it may change
                x = batch.mapped(Tensor.clone, x)
            x = augmented(self.augment, x, self.settings, self.round, self.client, k)
        return x, y

    def _gather(self, k: int) -> None:
        """Put the batches of step k, and of as many after it as TOGETHER holds, into x and y."""
        samples = self.samples
        if self.settings.batch_size is None:
            self.steps, (x, y) = range(len(self.parts)), samples.all()
        else:
            if isinstance(samples, LazySamples):  # read each sample once a pass, or once a round
                most = len(samples) if self.settings.local_epochs else len(self.numbers)
            else:
                first = batch.part(samples.x, slice(0, 1))
                most = TOGETHER // max(1, sum(leaf.numel() for leaf in batch.leaves(first)))
            self.first = self.parts[k].start
            last = bisect_right(self.parts, self.first + most, k + 1, key=lambda part: part.stop)
            self.steps = range(k, last)
            x, y = samples.take(self.numbers[self.first : self.parts[last - 1].stop])
        if self.device is not None:
            x, y = (batch.moved(values, self.device) for values in (x, y))
        self.x, self.y = x, y
