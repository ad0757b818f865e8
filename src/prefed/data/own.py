"""Arrays of the user's own, in an .npz file."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy

from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.data import reading
from prefed.data.dataset import DATASETS, Dataset
from prefed.data.images import CropAndFlip, Divide

Array = np.ndarray[Any, Any]


@DATASETS.register("npz")
def npz(path: str, test: float = 0.2, scale: float = 255.0, augment: bool = False) -> Dataset:
    """Your own arrays: x and y, and if you have them client, x_test and y_test.

    y holds labels 0, 1, ... if its numbers are whole, of whatever type, uint8 too; floating ones
    are numbers to predict. In sequences (N, T) a loss may ignore labels below 0. client says for
    each sample whose it is, as numbers or strings, for the split "natural".

    path     the file, as numpy.savez writes it
    test     the share of samples that is drawn for testing if there is no x_test
    scale    x of type uint8 is divided by this on its way to the model
    augment  in training, move each image (N, C, H, W) by up to 4 pixels and mirror half of them
    """
    where = Path(path).expanduser()
    arrays = read_npz(where)
    for name in ("x", "y"):
        if name not in arrays:
            raise PrefedError(f"{where}: there is no array {name!r} in it, only {sorted(arrays)}")
    x, y = _float32(arrays["x"]), _targets(where, arrays["y"])
    _check_lengths(where, "", x, y)
    if augment and x.ndim != 4:
        raise PrefedError(f"{where}: augment needs images (N, C, H, W), but x is {x.shape}")
    client = None
    if "client" in arrays:
        if arrays["client"].shape != (len(x),):
            raise PrefedError(f"{where}: client should have one entry for each of {len(x)} samples")
        client = np.unique(arrays["client"], return_inverse=True)[1].astype(np.int64)
    if ("x_test" in arrays) != ("y_test" in arrays):
        there, missing = ("x", "y") if "x_test" in arrays else ("y", "x")
        raise PrefedError(f"{where}: there is {there}_test in it, but no {missing}_test")
    if "x_test" in arrays:
        test_x, test_y = _float32(arrays["x_test"]), _targets(where, arrays["y_test"])
        _check_lengths(where, "_test", test_x, test_y)
        for name, one, other in (("x", x, test_x), ("y", y, test_y)):
            if one.shape[1:] != other.shape[1:]:
                sizes = f"of shape {other.shape[1:]} each, and {name} of {one.shape[1:]}"
                raise PrefedError(f"{where}: {name}_test has samples {sizes}")
    else:
        if not 0 < test < 1 or len(x) < 2:
            text = "test should lie between 0 and 1, or give x_test and y_test"
            raise PrefedError(f"{where}: {text}")
        order = draws.generator(0, "npz test").permutation(len(x))
        cut = min(max(1, round(test * len(x))), len(x) - 1)
        test_x, test_y = x[order[:cut]], y[order[:cut]]
        x, y = x[order[cut:]], y[order[cut:]]
        client = None if client is None else client[order[cut:]]
    tensors = [torch.from_numpy(a) for a in (x, y, test_x, test_y)]
    return Dataset(
        tensors[0],
        tensors[1],
        (tensors[2], tensors[3]),
        transform=Divide(scale) if x.dtype == np.uint8 else None,
        client=None if client is None else torch.from_numpy(client),
        classes=int(max(y.max(), test_y.max())) + 1 if y.dtype == np.int64 else None,
        augment=CropAndFlip() if augment else None,
        scale=scale,
    )


def _check_lengths(where: Path, which: str, x: Array, y: Array) -> None:
    if x.ndim and y.ndim and len(x) == len(y) == 0:
        raise PrefedError(f"{where}: x{which} and y{which} hold no samples")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        text = f"x{which} {x.shape} and y{which} {y.shape} should have the same length"
        raise PrefedError(f"{where}: {text}")


def _float32(x: Array) -> Array:
    return x if x.dtype == np.uint8 else x.astype(np.float32)


def _targets(where: Path, y: Array) -> Array:
    if y.dtype.kind == "f":
        return y.astype(np.float32)
    if y.dtype.kind not in "iub":
        raise PrefedError(f"{where}: y should hold labels or numbers, not {y.dtype}")
    labels = y.astype(np.int64)
    if labels.size and labels.ndim == 1 and labels.min() < 0:
        raise PrefedError(f"{where}: y has the label {labels.min()}; labels count from 0")
    return labels


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file. Sizes are compared before anything is allocated, and objects,
    which would have to be unpickled, are refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {}
            for info in archive.infolist():
                if not info.filename.endswith(".npy"):
                    raise reading.wrong(path, info.header_offset, f"{info.filename} is no array")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    text = f"{info.filename} is not compressed as numpy does it"
                    raise reading.wrong(path, info.header_offset, text)
                reading.refuse_bomb(path, info.header_offset, info.file_size)
                with archive.open(info) as member:
                    arrays[info.filename[:-4]] = _read_npy(path, info, member)
            return arrays
    except (
        zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, NotImplementedError, RuntimeError
    ) as error:  # fmt: skip
        raise reading.wrong(path, 0, f"not a readable .npz file: {error}") from None
    except EOFError:
        raise reading.wrong(path, path.stat().st_size, "the file ends too early") from None
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error}") from None


def _read_npy(path: Path, info: zipfile.ZipInfo, member: IO[bytes]) -> Array:
    where = f"{info.filename}: "
    try:
        version = npy.read_magic(member)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(member)
    except Exception as error:  # numpy reads the header as Python, which may fail in any way
        raise reading.wrong(path, info.header_offset, f"{where}not an array: {error}") from None
    if dtype.hasobject or dtype.kind not in "biufU":
        text = f"{where}arrays of {dtype} are not read; use numbers or strings"
        raise reading.wrong(path, info.header_offset, text)
    size = math.prod(shape) * dtype.itemsize
    if size != info.file_size - member.tell():
        text = f"{where}an array {shape} of {dtype} has {size} bytes, not "
        raise reading.wrong(path, info.header_offset, text + str(info.file_size - member.tell()))
    content = bytearray(size)
    reading.read_exactly(path, member, member.tell(), memoryview(content))
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
