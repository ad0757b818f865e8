"""What is looked at in samples before a run begins, as far as they need not be read for it."""

from typing import Any

import torch

from prefed.core.batch import Ragged, leaves
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data.samples import LazySamples, Samples


def shapes(samples: Samples) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape[1:]) for leaf in leaves(samples.x))


def dtypes(samples: Samples) -> tuple[str, str]:
    """Of x, by name if it is a dict, and of y."""
    found = [str(leaf.dtype) for leaf in leaves(samples.x)]
    if isinstance(samples.x, dict):
        found = [f"{name}: {dtype}" for name, dtype in zip(samples.x, found, strict=True)]
    return ", ".join(found), str(samples.y.dtype)


def check_samples(
    where: str,
    samples: Samples,
    classes: int | None,
    ignored: int | None,
    targets: bool,
    largest: float | None = None,
) -> None:
    if len(samples) == 0:
        raise PrefedError(f"{where}: it has no samples")
    if isinstance(samples, LazySamples):
        return
    y = samples.y.used() if isinstance(samples.y, Ragged) else samples.y
    for name, values in (("x", samples.x), ("y", y)) if targets else (("x", samples.x),):
        for leaf in leaves(values):
            numbers = leaf.used() if isinstance(leaf, Ragged) else leaf
            if numbers.dtype.is_floating_point and not bool(torch.isfinite(numbers).all()):
                raise PrefedError(
                    f"{where}: {name} has values that are not finite (NaN or infinity)"
                )
    if largest is not None and y.numel() and (y.min() < 0 or y.max() > largest):
        raise PrefedError(
            f"{where}: y reaches from {y.min():g} to {y.max():g}, but binary cross-entropy (bce) "
            f"takes 0 to {largest:g}; for labels of several classes take cross_entropy"
        )
    if classes is not None and targets and are_labels(y):
        if ignored is not None:
            y = y[y != ignored]
        low, high = (int(y.min()), int(y.max())) if y.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise PrefedError(
                f"{where}: labels reach from {low} to {high}, "
                f"but the model has outputs for labels 0 to {classes - 1}"
            )
