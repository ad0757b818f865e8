from importlib.resources import files
from typing import Any

import numpy as np
import torch

from prefed.core import draws
from prefed.data.dataset import DATASETS, Dataset
from prefed.data.images import Divide

LARGEST = 16
"""Value of a pixel."""
to_unit_range = Divide(LARGEST)


@DATASETS.register("digits")
def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels (UCI optdigits), 360 of them for testing."""
    with files("prefed.data").joinpath("digits.npz").open("rb") as file:
        arrays: dict[str, np.ndarray[Any, Any]] = dict(np.load(file, allow_pickle=False))
    order = draws.generator(0, "digits").permutation(len(arrays["y"]))
    x = torch.from_numpy(arrays["x"][order]).unsqueeze(1)
    y = torch.from_numpy(arrays["y"][order].astype(np.int64))
    return Dataset(x[360:], y[360:], (x[:360], y[:360]), to_unit_range, scale=LARGEST)
