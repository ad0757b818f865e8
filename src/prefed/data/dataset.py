"""Data sets and splits by name."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.core.registry import Registry
from prefed.data.federated import Augment, FederatedData, Partition, Transform

MOST_CLASSES = 1_000_000


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
    scale: float = 255.0
    """x of type uint8 stands for x / scale: 255 if they are pixels."""
    targets: Tensor | None = None
    """What the model is to give for x, if that is not y."""

    @property
    def wanted(self) -> Tensor:
        return self.y if self.targets is None else self.targets

    @property
    def outputs(self) -> int:
        """How many the model has to have: one for each class, or for each number of a target."""
        return self.labels if are_labels(self.wanted) else self.numbers

    @property
    def numbers(self) -> int:
        """How many numbers a target has."""
        return prod(self.wanted.shape[1:])

    @property
    def labels(self) -> int:
        """How many classes there are in y, which holds labels."""
        count = self.classes or int(self.y.max()) + 1
        if count > MOST_CLASSES:
            raise PrefedError(
                f"y: the label {count - 1} is too large: labels number the classes 0, 1, ..., as "
                f"numpy.unique(y, return_inverse=True)[1] does"
            )
        return count

    def with_input_as_target(self) -> "Dataset":
        """The same for a model that gives back its input; y is for the split alone."""
        if self.augment is not None:
            raise PrefedError(
                'data.target: "input" cannot be had from images that are changed in training; '
                "set data.augment = false"
            )
        test = None if self.test is None else (self.test[0], self._as_targets(self.test[0]))
        return replace(self, targets=self._as_targets(self.x), test=test)

    def _as_targets(self, x: Tensor) -> Tensor:
        """x itself where a loss knows what it stands for."""
        if are_labels(x):
            raise PrefedError(f'data.target: "input" needs uint8 or floating x, not {x.dtype}')
        if x.dtype == torch.uint8 and self.scale != 255:
            return x.to(torch.get_default_dtype()) / self.scale
        return x

    def hold_out(self, share: float, generator: np.random.Generator) -> "Dataset":
        """The same with a share of the training samples in place of the test samples."""
        order = torch.from_numpy(generator.permutation(len(self.y)))
        cut = max(1, round(share * len(order)))
        held, rest = order[:cut], order[cut:]
        return replace(
            self,
            x=self.x[rest],
            y=self.y[rest],
            test=(self.x[held], self.wanted[held]),
            client=None if self.client is None else self.client[rest],
            targets=None if self.targets is None else self.targets[rest],
        )


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
    clients = Partition(dataset.x, dataset.wanted, parts)
    return FederatedData(clients, dataset.test, dataset.transform, dataset.augment)
