from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

from torch import nn

from prefed.models import MODELS


@MODELS.register("autoencoder")
def autoencoder(
    inputs: Sequence[int],
    widths: Sequence[int] = (256, 64),
    activation: Literal["relu", "sigmoid"] = "relu",
) -> nn.Module:
    """Linear layers down to a code and back up, for data.target = "input": outputs in [0, 1], as
    many as the flattened input has numbers.

    widths      of the encoder, the last being the code; the decoder has them in reverse
    activation  between layers; the code is linear, and the outputs go through a sigmoid

    widths = [1000, 500, 250, 30] with activation = "sigmoid" is the network of Reddi et al. 2021
    (FedOpt) for EMNIST, but for torch's first weights instead of Glorot's.
    """
    if not widths:
        raise ValueError("widths should name at least the code")
    between = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}[activation]
    down = [prod(inputs), *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for sizes in (down, down[::-1]):
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), between()]
        layers.pop()
    return nn.Sequential(*layers, nn.Sigmoid())
