"""The IDX family: MNIST, Fashion-MNIST, KMNIST and the parts of EMNIST; plain or .gz."""

import struct
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from prefed.core.errors import PrefedError
from prefed.data import cache, reading
from prefed.data.dataset import DATASETS, Dataset
from prefed.data.images import CropAndFlip, Normalise

Array = np.ndarray[Any, Any]
Part = Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"]
EMNIST_CLASSES = {
    "balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10,
}  # fmt: skip
EMNIST_IMAGES = 814_255
"""In all of EMNIST: no part has more."""


@DATASETS.register("mnist")
def mnist(path: str | None = None, complete: bool = True, normalise: bool = True) -> Dataset:
    """70,000 handwritten digits of 28 x 28 pixels, 10,000 of them for testing.

    path       holds the four idx files, plain or .gz, or a folder with the data set's name
    complete   false accepts files with fewer images than the official ones have
    normalise  false leaves pixels between 0 and 1, in place of mean 0 and deviation 1
    """
    return _like_mnist("mnist", path, complete, (0.1307, 0.3081) if normalise else PLAIN)


@DATASETS.register("fashion-mnist")
def fashion_mnist(
    path: str | None = None, complete: bool = True, augment: bool = False, normalise: bool = True
) -> Dataset:
    """70,000 pictures of clothes of 28 x 28 pixels in 10 classes, 10,000 of them for testing.

    path, complete, normalise  as of mnist
    augment   in training, move each image by up to 4 pixels and mirror half of them
    """
    scale = (0.2860, 0.3530) if normalise else PLAIN
    return _like_mnist("fashion-mnist", path, complete, scale, augment)


@DATASETS.register("kmnist")
def kmnist(path: str | None = None, complete: bool = True) -> Dataset:
    """70,000 cursive Japanese characters of 28 x 28 pixels in 10 classes, 10,000 for testing.

    path, complete  as of mnist
    """
    return _like_mnist("kmnist", path, complete, (0.1918, 0.3483))


@DATASETS.register("emnist")
def emnist(path: str | None = None, part: Part = "balanced") -> Dataset:
    """Handwritten letters and digits of 28 x 28 pixels; the files hold them on their side.

    path  holds the idx files, plain or .gz, or a folder emnist or gzip with them
    part  balanced, byclass, bymerge, digits, letters or mnist
    """
    names = [f"emnist-{part}-{s}-{kind}" for s in ("train", "test") for kind in KINDS]
    letters = part == "letters"  # counted from 1 in the files
    classes = EMNIST_CLASSES[part]
    x, y, test_x, test_y = _read("emnist", reading.root(path), names, None, classes, letters)
    upright = [torch.from_numpy(a.transpose(0, 2, 1).copy()).unsqueeze(1) for a in (x, test_x)]
    targets = [torch.from_numpy(a.astype(np.int64) - letters) for a in (y, test_y)]
    normalise = Normalise((0.1736,), (0.3317,))
    test = (upright[1], targets[1])
    return Dataset(upright[0], targets[0], test, normalise, classes=classes)


PLAIN = 0.0, 1.0
"""Mean and deviation of pixels that stay between 0 and 1."""
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _like_mnist(
    name: str, path: str | None, complete: bool, scale: tuple[float, float], augment: bool = False
) -> Dataset:
    names = [f"{part}-{kind}" for part in ("train", "t10k") for kind in KINDS]
    counts = (60_000, 10_000) if complete else None
    arrays = _read(name, reading.root(path), names, counts, 10, False)
    x, y, test_x, test_y = (torch.from_numpy(a) for a in arrays)
    mean, deviation = scale
    normalise, change = Normalise((mean,), (deviation,)), CropAndFlip() if augment else None
    test = (test_x.unsqueeze(1), test_y.long())
    return Dataset(x.unsqueeze(1), y.long(), test, normalise, None, 10, change)


def _read(
    name: str,
    root: Path,
    names: list[str],
    counts: tuple[int, int] | None,
    classes: int,
    from_one: bool,
) -> list[Array]:
    """Images and labels for training, images and labels for testing."""
    found: list[Path] = []
    for file in names:
        places = [file, f"{file}.gz", f"gzip/{file}", f"gzip/{file}.gz"]
        places += [p.replace("-idx", ".idx") for p in places]  # as some copies of MNIST have it
        try:
            found.append(reading.find(name, root, places))
        except reading.Missing as error:
            if found:  # some of them are there
                raise PrefedError(str(error)) from None
            raise
    pixels, one = ((torch.uint8,), (28, 28)), ((torch.uint8,), ())
    form: cache.Form = {"x": pixels, "y": one, "test_x": pixels, "test_y": one}

    def decode() -> cache.Arrays:
        arrays = map(torch.from_numpy, _decode(found, counts, classes, from_one))
        return dict(zip(form, arrays, strict=True))

    options = [counts, classes, from_one]
    known = cache.decoded(name, found, options, form, decode)
    return [known[part].numpy() for part in form]


def _decode(
    found: list[Path], counts: tuple[int, int] | None, classes: int, from_one: bool
) -> list[Array]:
    arrays = []
    for pair in (0, 2):
        count = None if counts is None else counts[pair // 2]
        images = read_idx(found[pair], (count, 28, 28), EMNIST_IMAGES)
        labels = read_idx(found[pair + 1], (count,), EMNIST_IMAGES)
        if len(images) != len(labels):
            text = f"{len(labels)} labels for the {len(images)} images in {found[pair].name}"
            raise reading.wrong(found[pair + 1], 4, text)
        low = int(from_one)
        bad = np.flatnonzero((labels < low) | (labels >= low + classes))
        if len(bad):
            text = f"the label {labels[bad[0]]}, not one of {low} to {low + classes - 1}"
            raise reading.wrong(found[pair + 1], 8 + int(bad[0]), text)
        arrays += [images, labels]
    return arrays


def read_idx(path: Path, shape: tuple[int | None, ...], most: int) -> Array:
    """The array of bytes in an IDX file, plain or gzip. Sizes given as None are up to the file,
    the first of them at most `most`. Offsets count the bytes after unpacking."""
    with reading.open_plain_or_gzip(path) as file:
        head = bytearray(4 + 4 * len(shape))
        reading.read_exactly(path, file, 0, memoryview(head)[:4])
        if head[:4] != bytes([0, 0, 8, len(shape)]):
            text = f"the magic number is {head[:4].hex()}, not 000008{len(shape):02x}"
            raise reading.wrong(path, 0, f"{text} (bytes in {len(shape)} dimensions)")
        reading.read_exactly(path, file, 4, memoryview(head)[4:])
        found = struct.unpack(f">{len(shape)}I", head[4:])
        for k, (size, wanted) in enumerate(zip(found, shape, strict=True)):
            if wanted is not None and size != wanted:
                hint = "; set data.complete = false if that is meant" if k == 0 else ""
                text = f"dimension {k} has size {size}, the official file {wanted}{hint}"
                raise reading.wrong(path, 4 + 4 * k, text)
            if size == 0 or size > most:
                raise reading.wrong(path, 4 + 4 * k, f"dimension {k} cannot have size {size}")
        reading.refuse_bomb(path, 4, prod(found))
        array = np.empty(found, np.uint8)
        reading.read_exactly(path, file, len(head), array.data.cast("B"))
        reading.read_end(path, file, len(head) + array.size)
    return array
