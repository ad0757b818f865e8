"""ResNets for small images: a 3 x 3 stem without pooling, as He et al. have it for CIFAR."""

from collections.abc import Sequence
from math import gcd
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import relu

from prefed.models import MODELS, image_shape

Norm = Literal["group", "batch"]


@MODELS.register("resnet8")
def resnet8(
    inputs: Sequence[int], classes: int, width: int = 16, norm: Norm = "group", groups: int = 2
) -> nn.Module:
    """Three stages of one block, widths 16, 32, 64 (times width / 16).

    width   the channels of the first stage
    norm    "group" or "batch"
    groups  of norm = "group"
    """
    return ResNet(image_shape(inputs)[0], classes, (1, 1, 1), width, norm, groups)


@MODELS.register("resnet20")
def resnet20(
    inputs: Sequence[int], classes: int, width: int = 16, norm: Norm = "group", groups: int = 2
) -> nn.Module:
    """Three stages of three blocks, widths 16, 32, 64 (times width / 16).

    width   the channels of the first stage
    norm    "group" or "batch"
    groups  of norm = "group"
    """
    return ResNet(image_shape(inputs)[0], classes, (3, 3, 3), width, norm, groups)


@MODELS.register("resnet18")
def resnet18(
    inputs: Sequence[int], classes: int, width: int = 64, norm: Norm = "group", groups: int = 2
) -> nn.Module:
    """Four stages of two blocks, widths 64 to 512 (times width / 64).

    width   the channels of the first stage
    norm    "group" or "batch"
    groups  of norm = "group"
    """
    return ResNet(image_shape(inputs)[0], classes, (2, 2, 2, 2), width, norm, groups)


@MODELS.register("resnet34")
def resnet34(
    inputs: Sequence[int], classes: int, width: int = 64, norm: Norm = "group", groups: int = 2
) -> nn.Module:
    """Four stages of 3, 4, 6 and 3 blocks, widths 64 to 512 (times width / 64).

    width   the channels of the first stage
    norm    "group" or "batch"
    groups  of norm = "group"
    """
    return ResNet(image_shape(inputs)[0], classes, (3, 4, 6, 3), width, norm, groups)


class ResNet(nn.Module):
    """norm: "group" has no statistics that clients would have to agree on, and two groups by
    default as in Reddi et al.; "batch" has, and they are averaged with the weights."""

    def __init__(
        self,
        channels: int,
        classes: int,
        stages: Sequence[int],
        width: int,
        norm: Norm,
        groups: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = _norm(width, norm, groups)
        blocks: list[nn.Module] = []
        before = width
        for stage, depth in enumerate(stages):
            after = width << stage
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Block(before, after, stride, norm, groups))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(relu(self.norm(self.stem(x))))
        output: Tensor = self.head(x.mean((2, 3)))
        return output


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(after, norm, groups)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = _norm(after, norm, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            project = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, _norm(after, norm, groups))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.shortcut(x))


def _norm(channels: int, norm: Norm, groups: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(gcd(groups, channels), channels)
