"""Data sets and splits by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefed.data.federated import FederatedData, Partition, Transform
from prefed.registry import Registry


@dataclass(frozen=True)
class Dataset:
    """A data set before it is split: training samples, test samples, and how to feed them."""

    x: Any
    y: Any
    test: tuple[Any, Any]
    transform: Transform | None = None


Split = Callable[..., "list[np.ndarray[Any, Any]]"]
"""split(labels, generator, **options) -> sample numbers of each client."""

DATASETS: Registry[Callable[..., Dataset]] = Registry("data set", "prefed.data")
SPLITS: Registry[Split] = Registry("split", "prefed.data")


def partition(
    dataset: Dataset, split: Split, generator: np.random.Generator, options: dict[str, Any]
) -> FederatedData:
    parts = split(np.asarray(dataset.y), generator, **options)
    return FederatedData(Partition(dataset.x, dataset.y, parts), dataset.test, dataset.transform)
