from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from prefed.models import MODELS, First, first_weights


@MODELS.register("mlp")
def mlp(
    inputs: Sequence[int], classes: int, hidden: Sequence[int] = (128,), first: First = "torch"
) -> nn.Module:
    """Linear layers with ReLU between them, on flattened inputs.

    hidden  the widths between inputs and classes
    first   weights: torch's own, or those of "glorot" (as in TensorFlow) or "he"
    """
    widths = [prod(inputs), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return first_weights(nn.Sequential(*layers, nn.Linear(widths[-1], classes)), first)
