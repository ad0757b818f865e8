"""Clients that train on wrong labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from prefed.core.batch import Inputs, Ragged
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data.federated import FederatedData
from prefed.data.samples import LazySamples, Read, Samples


def flip_labels(data: FederatedData, lies: Callable[[int], bool]) -> FederatedData:
    """The same with classes - 1 - y in place of the label y of those clients that lie. The test
    samples stay. How many classes there are is known after `data.check`."""
    if data._labels is None or not are_labels(data.client(0).take(torch.arange(1))[1]):
        raise PrefedError("label_flip: the targets are no labels of classes; take another attack")
    clients, read = FlippedClients(data, lies, data._labels[0]), data._read
    made = FederatedData(
        clients, data.test, data.transform, data.augment, x=read.x, y=read.y,
        collate=read.collate, pad=data.pad, client_tests=data.client_tests,
    )  # fmt: skip
    made._labels = data._labels
    return made


class FlippedClients(Sequence[Samples]):
    def __init__(self, data: FederatedData, lies: Callable[[int], bool], classes: int) -> None:
        self.data, self.lies, self.classes = data, lies, classes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < len(self):
            raise IndexError(client)
        samples = self.data.client(client)
        if not self.lies(client):
            return samples
        if isinstance(samples, LazySamples):
            read = FlippedRead(**vars(samples.read), classes=self.classes)
            return LazySamples(samples.dataset, read, samples.index, samples.labels)
        x, y = samples.all()
        return Samples(x, flipped(y, self.classes))


@dataclass(frozen=True)
class FlippedRead(Read):
    classes: int = 2

    def __call__(self, rows: list[Any]) -> tuple[Inputs, Any]:
        x, y = super().__call__(rows)
        return x, flipped(y, self.classes)


def flipped(y: Any, classes: int) -> Any:
    """Labels that stand for no class stay."""
    if isinstance(y, Ragged):
        return replace(y, values=flipped(y.values, classes))
    return torch.where((y >= 0) & (y < classes), classes - 1 - y, y)
