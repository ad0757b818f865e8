"""LIBSVM text: a line per sample, `label index:value index:value ...`, indices from 1 upwards."""

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.data import cache, reading
from prefed.data.dataset import DATASETS, Dataset

Array = np.ndarray[Any, Any]


@DATASETS.register("a9a")
def a9a(path: str | None = None) -> Dataset:
    """Adult: 32,561 and 16,281 people with 123 yes-or-no features, two classes of income.

    path  holds a9a and a9a.t
    """
    return _official("a9a", path, 123, 32_561, 16_281)


@DATASETS.register("w8a")
def w8a(path: str | None = None) -> Dataset:
    """Web pages: 49,749 and 14,951 samples with 300 yes-or-no features, two classes.

    path  holds w8a and w8a.t
    """
    return _official("w8a", path, 300, 49_749, 14_951)


@DATASETS.register("libsvm")
def libsvm(path: str, features: int, test_path: str | None = None, test: float = 0.2) -> Dataset:
    """Any file in LIBSVM's text form, as a dense array of `features` columns.

    path       the file
    features   how many columns there are
    test_path  a second file for testing
    test       without one, this share of the samples, drawn once
    """
    x, labels = read_libsvm(Path(path), features, None)
    if test_path is not None:
        test_x, test_labels = read_libsvm(Path(test_path), features, None)
        if x.dtype != test_x.dtype:
            x, test_x = x.astype(np.float32), test_x.astype(np.float32)
    else:
        order = draws.generator(0, "libsvm").permutation(len(x))
        cut = max(1, round(test * len(x)))
        test_x, test_labels = x[order[:cut]], labels[order[:cut]]
        x, labels = x[order[cut:]], labels[order[cut:]]
    return _dataset(x, labels, test_x, test_labels)


def _official(name: str, path: str | None, features: int, train: int, test: int) -> Dataset:
    root = reading.root(path)
    x, labels = read_libsvm(reading.find(name, root, [name, f"{name}.txt"]), features, train)
    test_path = reading.find(name, root, [f"{name}.t", f"{name}.t.txt"])
    return _dataset(x, labels, *read_libsvm(test_path, features, test))


def _dataset(x: Array, labels: Array, test_x: Array, test_labels: Array) -> Dataset:
    """Labels of any numbers become 0, 1, ... in their order."""
    names = np.unique(np.concatenate([labels, test_labels]))
    y, test_y = (torch.from_numpy(np.searchsorted(names, a)) for a in (labels, test_labels))
    test = (torch.from_numpy(test_x), test_y)
    return Dataset(torch.from_numpy(x), y, test, to_float, classes=len(names), scale=1.0)


def to_float(x: Tensor) -> Tensor:
    return x.to(torch.get_default_dtype())


def read_libsvm(path: Path, features: int, most: int | None) -> tuple[Array, Array]:
    """(x, labels); x is uint8 if all values are whole numbers up to 255, else float32."""

    def decode() -> cache.Arrays:
        x, labels = _decode(path, features, most)
        return {"x": torch.from_numpy(x), "labels": torch.from_numpy(labels)}

    form: cache.Form = {
        "x": ((torch.uint8, torch.float32), (features,)),
        "labels": ((torch.float64,), ()),
    }
    found = cache.decoded("libsvm", [path], [features, most], form, decode)
    return found["x"].numpy(), found["labels"].numpy()


def _decode(path: Path, features: int, most: int | None) -> tuple[Array, Array]:
    rows, columns, values, labels = array("i"), array("i"), array("f"), array("d")
    offset = 0
    try:
        with open(path, "rb") as file:
            while line := file.readline(1 << 20):
                if words := line.partition(b"#")[0].split():
                    if most is not None and len(labels) >= most:
                        text = f"more than the {most} samples of the official file"
                        raise reading.wrong(path, offset, text)
                    try:
                        label, line_columns, line_values = _sample(words, features)
                    except ValueError as error:
                        text = f"line {len(labels) + 1}: {error}"
                        raise reading.wrong(path, offset, text) from None
                    rows.extend([len(labels)] * len(line_columns))
                    columns.extend(line_columns)
                    values.extend(line_values)
                    labels.append(label)
                offset += len(line)
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error}") from None
    if not labels:
        raise reading.wrong(path, offset, "it holds no samples")
    given = np.frombuffer(values, np.float32) if values else np.zeros(0, np.float32)
    whole = bool(((given == np.round(given)) & (given >= 0) & (given <= 255)).all())
    x = np.zeros((len(labels), features), np.uint8 if whole else np.float32)
    x[np.array(rows, np.int64), np.array(columns, np.int64)] = given
    return x, np.array(labels)


def _sample(words: list[bytes], features: int) -> tuple[float, list[int], list[float]]:
    """The label, columns and values of a line."""
    label, last, columns, values = _number(words[0]), 0, [], []
    if math.isnan(label):
        raise ValueError(f"the label {_short(words[0])} is not a number")
    for word in words[1:]:
        index, colon, text = word.partition(b":")
        value = _number(text)
        if not colon or not index.isdigit() or not abs(value) <= 3e38:
            raise ValueError(f"{_short(word)} should be index:value")
        if len(index) > 9 or not last < int(index) <= features:
            limits = f"above {last} and not above {features}"
            raise ValueError(f"the index {_short(index)} should lie {limits}")
        last = int(index)
        columns.append(last - 1)
        values.append(value)
    return label, columns, values


def _number(text: bytes) -> float:
    """Not a number if it is none that is finite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _short(text: bytes) -> str:
    return repr(text[:20].decode(errors="replace"))
