"""The loss of a task, where none is given: its targets say which."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from prefed.core.errors import PrefedError


def are_labels(y: Tensor) -> bool:
    """Whole numbers stand for classes; but uint8, which images have, for pixels."""
    return not y.dtype.is_floating_point and y.dtype != torch.uint8


def by_targets(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy for labels, squared error for numbers and pixels."""
    return cross_entropy(output, y) if are_labels(y) else squared_error(output, y)


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """The mean over samples and their numbers, in whatever shape these are. Pixels, which are
    uint8, are compared as value / 255."""
    given, wanted = output.reshape(output.shape[0], -1), y.reshape(y.shape[0], -1)
    if given.shape != wanted.shape:
        raise PrefedError(
            f"model, loss: squared error needs as many outputs as targets, but {given.shape[0]} "
            f"samples have {given.shape[1]} outputs each and {wanted.shape[0]} targets "
            f"have {wanted.shape[1]} numbers each"
        )
    numbers = wanted.to(given.dtype)
    return mse_loss(given, numbers / 255 if y.dtype == torch.uint8 else numbers)
