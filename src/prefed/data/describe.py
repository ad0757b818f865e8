"""What is in a directory of data files, and what a split looks like."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data.dataset import DATASETS, Dataset
from prefed.data.federated import FederatedData
from prefed.data.idx import EMNIST_CLASSES
from prefed.data.own import read_npz
from prefed.data.partition import Partition
from prefed.data.reading import Missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILED = ("cifar10", "cifar100", "mnist", "fashion-mnist", "kmnist", "shakespeare", "a9a", "w8a")
ALIKE = ("fashion-mnist", "kmnist")
"""Their files have the same names as those of MNIST."""


def check(folder: Path) -> list[tuple[str, str, bool]]:
    """(what, how it is, whether it is right) for every data set found in a directory, or for one
    .npz file."""
    if folder.is_file() and folder.suffix == ".npz":
        return [_check_npz(folder)]
    if not folder.is_dir():
        what = "is neither a directory nor an .npz file" if folder.exists() else "is not there"
        raise PrefedError(f"{folder}: {what}")
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        (name, name, {})
        for name in FILED
        if name not in ALIKE or (folder / name).is_dir() or folder.name == name
    ]
    wanted += [(f"emnist {part}", "emnist", {"part": part}) for part in EMNIST_CLASSES]
    found = []
    for title, name, options in wanted:
        try:
            found.append((title, summary(DATASETS.get(name)(path=str(folder), **options)), True))
        except Missing:
            continue
        except PrefedError as error:
            found.append((title, str(error), False))
    return found + [_check_npz(path) for path in sorted(folder.glob("*.npz"))]


def _check_npz(path: Path) -> tuple[str, str, bool]:
    try:
        arrays = read_npz(path)
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        for name, array in arrays.items():
            if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
                raise PrefedError(f"{name} has values that are not finite (NaN or infinity)")
        return path.name, f"{shapes}: {summary(DATASETS.get('npz')(path=str(path)))}", True
    except PrefedError as error:
        return path.name, str(error), False


def summary(dataset: Dataset) -> str:
    test = 0 if dataset.test is None else len(dataset.test[1])
    text = f"{len(dataset.y):,} training and {test:,} test samples"
    if are_labels(dataset.y):
        text += f", {dataset.labels} classes"
    if dataset.client is not None:
        text += f", {len(dataset.client.unique()):,} clients by nature"
    return text


def class_counts(dataset: Dataset, data: FederatedData, clients: int | None = None) -> Any:
    """Samples of each class on each client (clients, classes), or None without labels."""
    if len(dataset.y.shape) != 1 or not are_labels(dataset.y):
        return None
    assert isinstance(data.clients, Partition)
    parts, classes = data.clients.parts, dataset.labels
    shown = len(parts) if clients is None else min(clients, len(parts))
    owner = np.repeat(np.arange(shown), parts.sizes()[:shown])
    labels = np.asarray(dataset.y)[parts.order[: len(owner)]]
    counts = np.bincount(owner * classes + labels, minlength=shown * classes)
    return counts.reshape(shown, classes)


def heterogeneity(counts: Any) -> float:
    """The mean over clients of the total variation distance between a client's classes and those
    of all clients together, each client weighted alike: 0 if all are the same, and near 1 if
    each has a class of its own among many."""
    shares = counts / counts.sum(1, keepdims=True)
    overall = counts.sum(0) / counts.sum()
    return float(np.abs(shares - overall).sum(1).mean() / 2)


DRAWN = 200
"""Clients in a picture: with more, bars would be thinner than pixels."""


def draw(dataset: Dataset, data: FederatedData) -> "Figure":
    """A bar for each of the first clients, divided by class; its size if there are no labels."""
    from matplotlib.figure import Figure

    assert isinstance(data.clients, Partition)
    sizes = data.clients.parts.sizes()[:DRAWN]
    counts = class_counts(dataset, data, DRAWN)
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    clients = np.arange(len(sizes))
    if counts is None:
        axes.bar(clients, sizes, width=1.0)
    else:
        bottom = np.zeros(len(sizes))
        for label in range(counts.shape[1]):
            colour = f"C{label}" if counts.shape[1] <= 10 else None
            axes.bar(clients, counts[:, label], 1.0, bottom, color=colour, label=str(label))
            bottom += counts[:, label]
        if counts.shape[1] <= 20:
            axes.legend(title="class", ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_xlabel("client")
    axes.set_ylabel("samples")
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    return figure
