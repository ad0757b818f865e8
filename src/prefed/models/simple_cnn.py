from collections.abc import Sequence

from torch import nn

from prefed.core.errors import PrefedError
from prefed.models import MODELS, image_shape


@MODELS.register("simple-cnn")
def simple_cnn(
    inputs: Sequence[int],
    classes: int,
    channels: Sequence[int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
) -> nn.Module:
    """LeNet-like, as in NIID-Bench: two 5 x 5 convolutions with pooling, two hidden layers.

    channels  of the convolutions
    hidden    the widths of the hidden layers
    """
    depth, height, width = image_shape(inputs)
    if len(channels) != 2 or min(height, width) < 16:
        raise PrefedError("model: simple-cnn has two convolutions and needs 16 x 16 pixels or more")
    first, second = channels
    rows, columns = (((n - 4) // 2 - 4) // 2 for n in (height, width))
    layers: list[nn.Module] = [
        nn.Conv2d(depth, first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    ]  # fmt: skip
    before = second * rows * columns
    for after in hidden:
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, classes))
