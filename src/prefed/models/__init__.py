"""Models by name. A model is a function of its options that returns an nn.Module."""

from collections.abc import Callable, Sequence
from typing import Literal

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


First = Literal["torch", "glorot", "he"]
"""The first weights: torch's own, or those of Glorot and Bengio 2010 (TensorFlow's and Keras's
default) or He et al. 2015, with biases of 0."""


def first_weights(module: nn.Module, first: First) -> nn.Module:
    """The module, with the first weights that are asked for."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if first != "torch":
        draw = nn.init.xavier_uniform_ if first == "glorot" else nn.init.kaiming_normal_
        for layer in layers:
            draw(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module
