"""Vision transformers: images (N, C, H, W) to scores (N, classes)."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import dropout

from prefed.core.errors import PrefedError
from prefed.models import MODELS, image_shape
from prefed.models.attention import TransformerBlock

SIZES = {"nano": (64, 4, 4), "tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}
"""Width, layers and heads."""


@MODELS.register("vit")
class ViT(nn.Module):
    """Dosovitskiy et al. 2021: the image is cut into patches, each a vector; the first position of
    the sequence, which stands for no patch, ends in the scores.

    size      "nano", "tiny", "small" or "base" (those of DeiT): width, layers and heads
    width     of the embedding and of each block, in place of the size's
    layers    how many blocks, in place of the size's
    heads     of the attention, in place of the size's
    patch     the side of a patch, in pixels
    dropout   of the attention and of what the blocks add
    """

    def __init__(
        self,
        inputs: Sequence[int],
        classes: int,
        size: Literal["nano", "tiny", "small", "base"] = "nano",
        width: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        patch: Annotated[int, Field(ge=1)] = 4,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__()
        channels, high, wide = image_shape(inputs)
        if high % patch or wide % patch:
            raise PrefedError(f"images of {high} x {wide} are no multiples of patch = {patch}")
        given = zip((width, layers, heads), SIZES[size], strict=True)
        width, layers, heads = (usual if own is None else own for own, usual in given)
        if width % heads:
            raise PrefedError(f"width {width} should be a multiple of the {heads} heads")
        patches = (high // patch) * (wide // patch)
        self.patch, self.dropout = patch, dropout
        self.embed = nn.Linear(channels * patch * patch, width)
        self.first = nn.Parameter(torch.zeros(1, width))
        self.positions = nn.Parameter(torch.empty(1 + patches, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=False, dropout=dropout) for _ in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        p = self.patch
        cut = x.reshape(count, channels, height // p, p, width // p, p)
        h = self.embed(cut.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * p * p))
        h = torch.cat([self.first.expand(count, 1, -1), h], dim=1) + self.positions
        if self.dropout and self.training:
            h = dropout(h, self.dropout)
        output: Tensor = self.head(self.norm(self.blocks(h))[:, 0])
        return output
