"""The samples of a client, or of a whole data set: arrays, or read when they are needed."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from prefed.core import batch
from prefed.core.batch import Inputs, Leaf, Ragged, to_inputs
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels

Collate = Callable[[list[Any]], tuple[Any, Any]]
"""The samples of a batch, as the data set gives them -> x and y."""
Pad = float | Mapping[str, float] | None
"""What rows of unequal length are padded with: in all of x, or by name, y among them."""


def fill_of_targets(pad: Pad) -> float | None:
    """What y is padded with: -100, which torch's losses leave out, if nothing else is said."""
    if pad is None or not isinstance(pad, Mapping):
        return None if pad is None else -100
    return pad.get("y", -100)


def wide(y: Any) -> Any:
    """Labels as the int64 that torch's losses want; all else as it is."""
    narrow = isinstance(y, Tensor) and y.dtype in (torch.int8, torch.int16, torch.int32)
    return y.long() if narrow else y


def _address(array: Any) -> int | None:
    if isinstance(array, Tensor):
        return array.data_ptr()
    return array.ctypes.data if isinstance(array, np.ndarray) else None


class Samples:
    """Inputs and targets, all of them or those that `index` names. Nothing is copied but labels of
    less than 64 bits."""

    def __init__(
        self, x: Any, y: Any, index: Tensor | None = None, pad: Pad = None, where: str = ""
    ) -> None:
        self.x: Inputs = to_inputs(f"{where}x", x, pad)
        self.y: Any = wide(to_inputs(f"{where}y", y, fill_of_targets(pad)))
        self.index = index

    def __len__(self) -> int:
        return batch.size(self.x) if self.index is None else len(self.index)

    def numbers(self, index: Tensor) -> Tensor:
        """Where in x and y the samples lie that `index` names."""
        return index if self.index is None else self.index.index_select(0, index)

    def take(self, index: Tensor) -> tuple[Inputs, Any]:
        index = self.numbers(index)
        return batch.take(self.x, index), self.y.index_select(0, index)

    def all(self) -> tuple[Inputs, Any]:
        if self.index is None:
            return self.x, self.y
        return batch.take(self.x, self.index), self.y.index_select(0, self.index)

    def part(self, index: Tensor | None) -> Self:
        """Those that `index` names, of a whole, whose arrays have been looked at already."""
        made = type(self).__new__(type(self))
        made.x, made.y, made.index = self.x, self.y, index
        return made

    @property
    def is_ragged(self) -> bool:
        """Batches of equally many samples may differ in shape."""
        return batch.is_ragged(self.x, self.y)

    def shares_memory(self, x: Any, y: Any) -> bool:
        """They are these arrays, and not copies of them."""
        pairs = zip((self.x, self.y), (x, y), strict=True)
        return all(isinstance(own, Tensor) and own.data_ptr() == _address(v) for own, v in pairs)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What samples have in common that can be put side by side."""
        return batch.kind(self.x), batch.kind(self.y)

    def is_of(self, other: "Samples") -> bool:
        """Both are parts of one whole."""
        lazy = isinstance(other, LazySamples)  # whose x would be read now
        return not lazy and self.x is other.x and self.y is other.y


@dataclass(frozen=True)
class Read:
    """How the samples that a data set gives become x and y.

    x, y     the columns, where a sample is a dict; several columns of numbers become one vector,
             and a dict {keyword of the model: column} becomes a dict
    collate  the user's own way, which is handed a list of samples
    pad      what rows of unequal length are padded with
    """

    x: str | Sequence[str] | Mapping[str, str] = "x"
    y: str | Sequence[str] = "y"
    collate: Collate | None = None
    pad: Pad = None

    def __call__(self, rows: list[Any]) -> tuple[Inputs, Any]:
        if self.collate is not None:
            x, y = self.collate(rows)
            return to_inputs("x", x, self.pad), wide(to_inputs("y", y, fill_of_targets(self.pad)))
        if isinstance(rows[0], Mapping):
            if isinstance(self.x, Mapping):
                found = {k: self._column(rows, "x", column) for k, column in self.x.items()}
                return self._stacked(found, self._column(rows, "y", self.y))
            inputs, targets = self._column(rows, "x", self.x), self._column(rows, "y", self.y)
        elif isinstance(rows[0], tuple | list) and len(rows[0]) == 2:
            inputs, targets = ([row[place] for row in rows] for place in (0, 1))
        else:
            raise PrefedError(
                f"clients: a sample should be a pair (x, y) or a dict, not "
                f"{type(rows[0]).__name__}; give `collate`, which makes x and y of samples"
            )
        if isinstance(inputs[0], Mapping):
            return self._stacked({k: [row[k] for row in inputs] for k in inputs[0]}, targets)
        fill = None if isinstance(self.pad, Mapping) else self.pad
        return _stack("x", [_image(value) for value in inputs], fill), self._targets(targets)

    def _stacked(self, columns: dict[str, list[Any]], targets: list[Any]) -> tuple[Inputs, Any]:
        fills = self.pad if isinstance(self.pad, Mapping) else dict.fromkeys(columns, self.pad)
        found = {name: _stack(name, col, fills.get(name)) for name, col in columns.items()}
        return found, self._targets(targets)

    def _targets(self, targets: list[Any]) -> Leaf:
        found: Leaf = wide(_stack("y", targets, fill_of_targets(self.pad)))
        return found

    def _column(self, rows: list[Any], which: str, name: str | Sequence[str]) -> list[Any]:
        names = [name] if isinstance(name, str) else name
        if missing := [n for n in names if n not in rows[0]]:
            raise PrefedError(
                f"{which}: the samples have no column {missing[0]!r}, only "
                f'{", ".join(map(repr, rows[0]))}; say which, as x="image", y="label"'
            )
        if isinstance(name, str):
            return [row[name] for row in rows]
        return [[row[n] for n in name] for row in rows]


@dataclass(frozen=True)
class Labels:
    """Which labels there may be.

    ignored   one that stands for no class
    whose     the name of the client that has the sample of this number
    """

    classes: int
    ignored: int | None
    whose: Callable[[int], str]

    def wrong(self, y: Any) -> Tensor:
        """The numbers of the samples in y that have another label."""
        if isinstance(y, Ragged):
            y = Ragged(y.values, y.starts, y.lengths, self.ignored or 0).padded()
        beyond: Tensor = (y < 0) | (y >= self.classes)
        if self.ignored is not None:
            beyond &= y != self.ignored
        return beyond.reshape(len(y), -1).any(1).nonzero().flatten()

    def check(self, y: Any, numbers: Sequence[int]) -> None:
        """Raise for the first of these samples whose label is none of them."""
        if not are_labels(y) or not len(rows := self.wrong(y)):
            return
        number, found = numbers[int(rows[0])], batch.padded(y.index_select(0, rows[:1])).flatten()
        label = int(found[self.wrong(found)[0]])
        raise PrefedError(
            f"{self.whose(number)}: sample {number} of its data set has the label {label}, "
            f"but the model has outputs for labels 0 to {self.classes - 1}"
        )


_READING = threading.Lock()
"""Workers are threads, and a data set with an open file need not bear two of them."""


class LazySamples(Samples):
    """Samples of a data set with len() and samples by number, as torch has them. Those that are
    asked for are read when they are, each once, and their labels checked."""

    def __init__(
        self, dataset: Any, read: Read, index: Tensor | None = None, labels: Labels | None = None
    ) -> None:
        self.dataset, self.read, self.index, self.labels = dataset, read, index, labels

    def __len__(self) -> int:
        return len(self.dataset) if self.index is None else len(self.index)

    @property
    def x(self) -> Inputs:
        """All of them, read now."""
        return self.all()[0]

    @property
    def y(self) -> Any:
        return self.all()[1]

    def take(self, index: Tensor) -> tuple[Inputs, Any]:
        once, places = torch.unique(self.numbers(index), return_inverse=True)
        x, y = self._fetch(once.tolist())
        return batch.take(x, places), y.index_select(0, places)

    def all(self) -> tuple[Inputs, Any]:
        return self._fetch(list(range(len(self))) if self.index is None else self.index.tolist())

    def part(self, index: Tensor | None) -> Self:
        return type(self)(self.dataset, self.read, index, self.labels)

    def checked(self, labels: Labels | None) -> Self:
        """The same with these labels and no others."""
        return type(self)(self.dataset, self.read, self.index, labels)

    def check_column(self) -> None:
        """Where the data set has its targets at hand, read the first sample whose label is wrong:
        a data set may make another of it."""
        column = _targets(self.dataset, self.read)
        if column is not None and self.labels is not None:
            column = column if self.index is None else column[self.index]
            if len(wrong := self.labels.wrong(column)):
                self.take(wrong[:1])

    @property
    def is_ragged(self) -> bool:
        return self.read.pad is not None

    def is_of(self, other: Samples) -> bool:
        return isinstance(other, LazySamples) and self.dataset is other.dataset

    def _fetch(self, numbers: list[int]) -> tuple[Inputs, Any]:
        many = getattr(self.dataset, "__getitems__", None)  # torch's name for many at a time
        with _READING:
            rows = many(numbers) if many else [self.dataset[number] for number in numbers]
            x, y = self.read(rows)
        if self.labels is not None:
            self.labels.check(y, numbers)
        return x, y


def _targets(dataset: Any, read: Read) -> Tensor | None:
    """The labels of all samples (N), where a data set has them in one piece: in a column, or under
    the names that those of torchvision use."""
    if isinstance(dataset, Subset):
        whole = _targets(dataset.dataset, read)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    try:
        if hasattr(dataset, "column_names"):
            column = dataset.with_format("numpy")[read.y][:]
        else:
            column = getattr(dataset, "targets", None)
            column = getattr(dataset, "labels", None) if column is None else column
        found = torch.as_tensor(column)
    except Exception:  # what anybody's data set may raise, or hold under these names
        return None
    fits = found.shape == (len(dataset),) and are_labels(found) and read.collate is None
    return found if fits else None


def to_samples(item: Any, where: str, read: Read) -> Samples:
    """Of a pair (x, y) of arrays, or of a data set."""
    if isinstance(item, Samples):
        return item
    if _is_table(item):
        raise PrefedError(
            f"{where}: a table has no x and y of its own; give the pair (table[inputs].to_numpy(), "
            f"table[target].to_numpy())"
        )
    if not isinstance(item, tuple | list | Tensor | np.ndarray):
        return _of_dataset(item, where, read)
    try:
        x, y = (part.to_numpy() if _is_table(part) else part for part in item)
        made = Samples(x, y, pad=read.pad, where=f"{where}: ")
    except PrefedError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise PrefedError(f"{where}: should be a pair (x, y) of arrays: {error}") from None
    if not (batch.leaves(made.x)[0].shape and made.y.shape) or len(made) != len(made.y):
        raise PrefedError(f"{where}: x and y should have the same number of samples")
    return made


def _is_table(value: Any) -> bool:
    """A table or a column of pandas, polars and their like."""
    return hasattr(value, "to_numpy") and not isinstance(value, Tensor | np.ndarray)


def _of_dataset(item: Any, where: str, read: Read) -> Samples:
    if isinstance(item, TensorDataset) and len(item.tensors) == 2 and read.collate is None:
        return Samples(*item.tensors)
    if isinstance(item, Subset) and isinstance(item.dataset, TensorDataset):
        whole = _of_dataset(item.dataset, where, read)
        return whole.part(torch.as_tensor(item.indices, dtype=torch.int64))
    try:
        len(item)
        item.__getitem__  # noqa: B018
    except (TypeError, NotImplementedError, AttributeError):
        raise PrefedError(
            f"{where}: should be a pair (x, y) of arrays, or a data set with len() and samples by "
            f"number, not {type(item).__name__}"
        ) from None
    return LazySamples(item, read)


def _image(value: Any) -> Any:
    """An image as torchvision's ToTensor makes it, (C, H, W) from 0 to 1; others as they are."""
    if (mode := getattr(value, "mode", None)) is not None and hasattr(value, "getbands"):  # PIL's
        value = np.asarray(value.convert({"1": "L", "P": "RGB"}.get(mode, mode)))
        value = value[..., None] if value.ndim == 2 else value
    elif not isinstance(value, np.ndarray) or value.ndim != 3 or value.shape[2] not in (1, 3, 4):
        return value
    if value.dtype != np.uint8:
        return value
    pixels = torch.from_numpy(np.array(value.transpose(2, 0, 1), order="C"))
    return pixels.to(torch.get_default_dtype()).div_(255)


def _stack(which: str, values: list[Any], fill: float | None = None) -> Leaf:
    try:
        tensors = [_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError):
        raise PrefedError(
            f"{which}: is of type {type(values[0]).__name__}, which does not become one array; "
            f"let the data set give numbers of one shape, or give `collate`"
        ) from None
    if fill is not None and tensors[0].dim() and len({t.shape[1:] for t in tensors}) == 1:
        return Ragged.of(tensors, fill)
    if len(shapes := {tuple(t.shape) for t in tensors}) > 1:
        a, b, *_ = sorted(shapes)
        raise PrefedError(
            f"{which}: samples have shapes {a} and {b}; bring them to one shape "
            f"in the data set (cut, resize), say what they are padded with (pad=0), or give "
            f"`collate`"
        )
    return torch.stack(tensors)


def _tensor(value: Any) -> Tensor:
    """As torch takes it: Python's floats in torch's default type, whole numbers as int64."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list) and value and isinstance(value[0], Tensor | np.ndarray | np.generic):
        return torch.stack([torch.as_tensor(v) for v in value])
    if hasattr(value, "getbands") or (isinstance(value, np.ndarray) and not value.flags.writeable):
        value = np.array(value)
    found = torch.as_tensor(value)
    return found.long() if found.dtype == torch.bool else found
