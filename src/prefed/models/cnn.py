from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from prefed.models import MODELS, image_shape


@MODELS.register("cnn")
def cnn(
    inputs: Sequence[int],
    classes: int,
    channels: Sequence[int] = (32, 64),
    hidden: int = 128,
    kernel: int = 3,
) -> nn.Module:
    """Convolutions, each with ReLU and 2 x 2 max-pooling, then one hidden layer.

    channels  of each convolution
    hidden    the width of the hidden layer
    kernel    the side of the convolutions
    """
    depth, height, width = image_shape(inputs)
    layers: list[nn.Module] = []
    for a, b in pairwise([depth, *channels]):
        layers += [nn.Conv2d(a, b, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
    pooled = channels[-1] * (height >> len(channels)) * (width >> len(channels))
    head = [nn.Flatten(), nn.Linear(pooled, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers, *head)
