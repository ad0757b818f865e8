"""Data sets and splits by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.data.federated import Augment, FederatedData, Partition, Transform
from prefed.registry import Registry


@dataclass(frozen=True)
class Dataset:
    """A data set before it is split: training samples, test samples, and how to feed them."""

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor] | None
    transform: Transform | None = None
    client: Tensor | None = None
    """A number for each training sample: whose it is by nature, for the split "natural"."""
    classes: int | None = None
    """How many there are, if not all of them need be in y."""
    augment: Augment | None = None
    """Applied to batches in training."""

    @property
    def outputs(self) -> int:
        """What the model has to have outputs for; 1 if the targets are not labels."""
        if self.y.dtype.is_floating_point:
            return 1
        return self.classes or int(self.y.max()) + 1

    def hold_out(self, share: float, generator: np.random.Generator) -> Dataset:
        """The same with a share of the training samples in place of the test samples."""
        order = torch.from_numpy(generator.permutation(len(self.y)))
        cut = max(1, round(share * len(order)))
        held, rest = order[:cut], order[cut:]
        test = (self.x[held], self.y[held])
        client = None if self.client is None else self.client[rest]
        return replace(self, x=self.x[rest], y=self.y[rest], test=test, client=client)


Split = Callable[..., "Sequence[np.ndarray[Any, Any]]"]
"""split(labels, generator, **options) -> sample numbers of each client. A split with a parameter
`keys` is handed the data set's own client numbers as well, or None."""

GIVEN_TO_SPLITS = ("labels", "generator", "keys")

DATASETS: Registry[Callable[..., Dataset]] = Registry("data set", "prefed.data")
SPLITS: Registry[Split] = Registry("split", "prefed.data")


def partition(
    dataset: Dataset, split: Split, generator: np.random.Generator, options: dict[str, Any]
) -> FederatedData:
    given: dict[str, Any] = {}
    if "keys" in inspect.signature(split).parameters:
        given["keys"] = None if dataset.client is None else np.asarray(dataset.client)
    parts = split(np.asarray(dataset.y), generator, **given, **options)
    clients = Partition(dataset.x, dataset.y, parts)
    return FederatedData(clients, dataset.test, dataset.transform, dataset.augment)
