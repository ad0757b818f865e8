"""Data sets and splits by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.data.federated import FederatedData, Partition, Transform
from prefed.registry import Registry


@dataclass(frozen=True)
class Dataset:
    """A data set before it is split: training samples, test samples, and how to feed them."""

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor]
    transform: Transform | None = None

    def hold_out(self, share: float, generator: np.random.Generator) -> Dataset:
        """The same with a share of the training samples in place of the test samples."""
        order = torch.from_numpy(generator.permutation(len(self.y)))
        cut = max(1, round(share * len(order)))
        held, rest = order[:cut], order[cut:]
        test = (self.x[held], self.y[held])
        return replace(self, x=self.x[rest], y=self.y[rest], test=test)


Split = Callable[..., "list[np.ndarray[Any, Any]]"]
"""split(labels, generator, **options) -> sample numbers of each client."""

DATASETS: Registry[Callable[..., Dataset]] = Registry("data set", "prefed.data")
SPLITS: Registry[Split] = Registry("split", "prefed.data")


def partition(
    dataset: Dataset, split: Split, generator: np.random.Generator, options: dict[str, Any]
) -> FederatedData:
    parts = split(np.asarray(dataset.y), generator, **options)
    return FederatedData(Partition(dataset.x, dataset.y, parts), dataset.test, dataset.transform)
