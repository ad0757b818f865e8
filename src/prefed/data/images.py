"""Batches of images on their way to the model: they stay uint8 until the last moment."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Divide:
    """Numbers to shares of the largest there can be, in the model's dtype."""

    takes_blocks: ClassVar[bool] = True
    """It may be called once for the batches of many clients (C, B, ...): engines do."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype()) / self.scale


class Normalise:
    """uint8 in [0, 255] to (x / 255 - mean) / std for each channel, in the model's dtype."""

    takes_blocks: ClassVar[bool] = True

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean, std

    def __call__(self, x: Tensor) -> Tensor:
        dtype = torch.get_default_dtype()
        mean = torch.tensor(self.mean, dtype=dtype, device=x.device).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=dtype, device=x.device).view(-1, 1, 1)
        return x.to(dtype).div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class CropAndFlip:
    """Each image of a batch is moved by up to `padding` pixels, zeros coming in, and mirrored
    with probability a half. Offsets are drawn on the CPU, so that they are the same on every
    device; the pixels are moved where the batch is, all at once."""

    padding: int = 4
    flip: bool = True
    keeps_shape: ClassVar[bool] = True
    """Images come out as large as they went in: engines may rely on it."""

    def __call__(self, x: Tensor, generator: np.random.Generator) -> Tensor:
        count, channels, height, width = x.shape
        drawn = generator.integers(2 * self.padding + 1, size=(count, 2))
        mirrored = generator.integers(2, size=count) * self.flip
        columns = np.arange(width)[None] + drawn[:, 1:]
        columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
        rows = np.arange(height)[None] + drawn[:, :1]
        places = rows[:, :, None] * (width + 2 * self.padding) + columns[:, None]
        index = torch.from_numpy(places.reshape(count, 1, height * width)).to(x.device)
        pixels = pad(x, (self.padding,) * 4).flatten(2)
        return pixels.gather(2, index.expand(-1, channels, -1)).view(x.shape)
