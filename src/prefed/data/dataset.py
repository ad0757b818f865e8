"""Data sets and splits by name."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.core.batch import Inputs, Ragged, is_ragged, mapped, take, to_inputs
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.core.registry import Registry
from prefed.data.federated import Augment, FederatedData, Transform
from prefed.data.partition import Partition, Parts
from prefed.data.samples import Pad, fill_of_targets

MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class Dataset:
    """A data set before it is split: training samples, test samples, and how to feed them."""

    x: Inputs
    """An array; or a dict of arrays, which the model takes as keywords; or a tuple of tensors."""
    y: Any
    test: tuple[Inputs, Any] | None
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
    pad: Pad = None
    """What rows of unequal length are padded with, as in FederatedData."""

    def __post_init__(self) -> None:
        given = {"x": self.x, "y": self.y}
        if self.test is not None:
            given |= {"test x": self.test[0], "test y": self.test[1]}
        fills = self.pad, fill_of_targets(self.pad)
        found = [to_inputs(n, v, fills[n.endswith("y")]) for n, v in given.items()]
        for name, value in zip(("x", "y"), found[:2], strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "test", (found[2], found[3]) if self.test is not None else None)

    @property
    def wanted(self) -> Any:
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
    def inputs(self) -> Any:
        """The shape of what a model is given of a sample: of each, if there are several."""
        return mapped(lambda leaf: tuple(leaf.shape[1:]), self.x)

    @property
    def labels(self) -> int:
        """How many classes there are in y, which holds labels."""
        values = self.y.used() if isinstance(self.y, Ragged) else self.y
        count = self.classes or int(values.max()) + 1
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

    def _as_targets(self, x: Inputs) -> Tensor:
        """x itself where a loss knows what it stands for."""
        if not isinstance(x, Tensor):
            raise PrefedError('data.target: "input" needs x to be one array')
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
            x=take(self.x, rest),
            y=take(self.y, rest),
            test=(take(self.x, held), take(self.wanted, held)),
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
    labels = np.zeros(len(dataset.y), int) if is_ragged(dataset.y) else np.asarray(dataset.y)
    parts = _checked(split(labels, generator, **given, **options), len(labels))
    clients = Partition(dataset.x, dataset.wanted, parts)
    return FederatedData(clients, dataset.test, dataset.transform, dataset.augment)


def _checked(parts: Any, samples: int) -> Parts:
    """What a split returned, which may be the user's own."""
    try:
        made = Parts.of(parts)
        order = np.asarray(made.order)
        wrong = order[(order < 0) | (order >= samples)]
    except (TypeError, ValueError) as error:
        told = f"should return the sample numbers of each client: {error}"
        raise PrefedError(f"data.split: {told}") from error
    if len(wrong):
        raise PrefedError(f"data.split: sample {wrong[0]} is none of 0 to {samples - 1}")
    return made
