"""CIFAR-10 and CIFAR-100 from their official files, binary or pickled Python layout."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from prefed.core.errors import PrefedError
from prefed.data import cache, reading
from prefed.data.cifar_pickle import read_pickle
from prefed.data.dataset import DATASETS, Dataset
from prefed.data.images import CropAndFlip, Normalise

PIXELS = 3 * 32 * 32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layout:
    """One of the two official forms of a data set."""

    folder: str
    train: tuple[str, ...]
    test: str


BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
CIFAR10 = (
    Layout("cifar-10-batches-bin", tuple(f"{n}.bin" for n in BATCHES), "test_batch.bin"),
    Layout("cifar-10-batches-py", BATCHES, "test_batch"),
)
CIFAR100 = (
    Layout("cifar-100-binary", ("train.bin",), "test.bin"),
    Layout("cifar-100-python", ("train",), "test"),
)


@DATASETS.register("cifar10")
def cifar10(path: str | None = None, augment: bool = True, complete: bool = True) -> Dataset:
    """60,000 colour images of 32 x 32 pixels in 10 classes, 10,000 of them for testing.

    path      holds cifar-10-batches-bin or cifar-10-batches-py, or is one of them
    augment   in training, move each image by up to 4 pixels and mirror half of them
    complete  false accepts files with fewer images than the official ones have
    """
    normalise = Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _load("cifar10", CIFAR10, path, (b"labels",), 10, normalise, augment, complete)


@DATASETS.register("cifar100")
def cifar100(
    path: str | None = None,
    augment: bool = True,
    complete: bool = True,
    labels: Literal["fine", "coarse"] = "fine",
) -> Dataset:
    """60,000 colour images of 32 x 32 pixels in 100 classes (or 20 coarse ones).

    path      holds cifar-100-binary or cifar-100-python, or is one of them
    augment   in training, move each image by up to 4 pixels and mirror half of them
    complete  false accepts files with fewer images than the official ones have
    """
    normalise = Normalise((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))
    keys = (b"coarse_labels", b"fine_labels")
    dataset = _load("cifar100", CIFAR100, path, keys, 100, normalise, augment, complete)
    assert dataset.test is not None
    column, classes = (1, 100) if labels == "fine" else (0, 20)
    test = (dataset.test[0], dataset.test[1][:, column].contiguous())
    return replace(dataset, y=dataset.y[:, column].contiguous(), test=test, classes=classes)


def _load(
    name: str,
    layouts: tuple[Layout, ...],
    path: str | None,
    label_keys: tuple[bytes, ...],
    classes: int,
    normalise: Normalise,
    augment: bool,
    complete: bool,
) -> Dataset:
    layout, folder = _locate(name, layouts, reading.root(path))
    limits = (classes,) if len(label_keys) == 1 else (20, classes)
    read = _read_binary if layout.test.endswith(".bin") else _read_pickled

    def part(names: tuple[str, ...], images: int) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = []
        for n in names:
            pieces.append(
                read(folder / n, label_keys, limits, images // len(names) if complete else None)
            )
        x = np.concatenate([x for x, _ in pieces]).reshape(-1, 3, 32, 32)  # the only copy
        labels = np.concatenate([y for _, y in pieces]).astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(labels if len(limits) > 1 else labels[:, 0])

    def decode() -> cache.Arrays:
        (x, y), (test_x, test_y) = part(layout.train, 50_000), part((layout.test,), 10_000)
        return {"x": x, "y": y, "test_x": test_x, "test_y": test_y}

    files = [folder / n for n in (*layout.train, layout.test)]
    for file in files:
        if not file.is_file():
            raise PrefedError(str(reading.missing(name, file.name, folder)))
    pixels = (torch.uint8,), (3, 32, 32)
    labels = (torch.int64,), (2,) if len(limits) > 1 else ()
    form: cache.Form = {"x": pixels, "y": labels, "test_x": pixels, "test_y": labels}
    found = cache.decoded(name, files, complete, form, decode)
    change = CropAndFlip() if augment else None
    test = found["test_x"], found["test_y"]
    return Dataset(found["x"], found["y"], test, normalise, None, classes, change)


def _locate(name: str, layouts: tuple[Layout, ...], root: Path) -> tuple[Layout, Path]:
    for layout in layouts:
        for folder in (root / layout.folder, root / name / layout.folder, root):
            if (folder / layout.test).is_file() or (folder / layout.train[0]).is_file():
                return layout, folder
    raise reading.missing(name, " or ".join(layout.folder for layout in layouts), root)


def _read_binary(
    path: Path, label_keys: tuple[bytes, ...], limits: tuple[int, ...], count: int | None
) -> tuple[Array, Array]:
    """Pixels and labels. A record is a label byte (CIFAR-100: coarse and fine) and the pixels,
    channel by channel."""
    width = len(limits) + PIXELS
    size = path.stat().st_size
    if size % width or size == 0:
        whole = size // width
        text = f"the file ends here, inside record {whole} (a record has {width} bytes)"
        raise reading.wrong(path, size, text)
    _check_count(path, size, size // width, count)
    records = np.fromfile(path, np.uint8).reshape(-1, width)
    labels = records[:, : len(limits)].copy()
    _check_labels(path, labels, limits, width)
    return records[:, len(limits) :], labels


def _read_pickled(
    path: Path, label_keys: tuple[bytes, ...], limits: tuple[int, ...], count: int | None
) -> tuple[Array, Array]:
    content = read_pickle(path)
    size = path.stat().st_size
    if not isinstance(content, dict):
        raise reading.wrong(path, 0, "it should hold a dictionary")
    pixels = content.get(b"data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise reading.wrong(path, 0, f'"data" should be an array of rows of {PIXELS} bytes')
    columns = []
    for key in label_keys:
        column = content.get(key)
        if not isinstance(column, list) or not all(type(label) is int for label in column):
            raise reading.wrong(path, 0, f'"{key.decode()}" should be a list of whole numbers')
        if len(column) != len(pixels):
            text = f'"{key.decode()}" has {len(column)} entries for {len(pixels)} images'
            raise reading.wrong(path, 0, text)
        columns.append(np.array([min(max(label, -1), 1 << 20) for label in column], np.int64))
    _check_count(path, size, len(pixels), count)
    labels = np.stack(columns, axis=1)
    _check_labels(path, labels, limits, None)
    return pixels, labels


def _check_count(path: Path, offset: int, found: int, count: int | None) -> None:
    if found == 0:
        raise reading.wrong(path, offset, "it holds no images")
    if count is not None and found != count:
        text = f"it holds {found} images, the official file {count}; set data.complete = false "
        raise reading.wrong(path, offset, text + "if that is meant")


def _check_labels(path: Path, labels: Array, limits: tuple[int, ...], width: int | None) -> None:
    bad = (labels < 0) | (labels >= np.array(limits))
    if bad.any():
        record, column = np.argwhere(bad)[0]
        offset = 0 if width is None else int(record) * width + int(column)
        text = f"image {record} has the label {labels[record, column]}, not one of 0 to "
        raise reading.wrong(path, offset, text + str(limits[column] - 1))
