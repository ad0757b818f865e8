"""Models by name. A model is a function of its options that returns an nn.Module."""

from collections.abc import Callable, Sequence

from torch import nn

from prefed.core.errors import PrefedError
from prefed.core.registry import Registry

MODELS: Registry[Callable[..., nn.Module]] = Registry("model", "prefed.models")


def image_shape(inputs: Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width) of the inputs, if they are images."""
    if len(inputs) != 3:
        raise PrefedError(f"it needs images (channels, height, width), not x of {tuple(inputs)}")
    first, second, last = inputs
    if first > 4 and ((last in (3, 4) and second > 4) or (last == 1 and first == second)):
        raise PrefedError(
            f"x looks like images with the channels last, {tuple(inputs)}: they come first, "
            f"x.transpose(0, 3, 1, 2) in NumPy"
        )
    return first, second, last
