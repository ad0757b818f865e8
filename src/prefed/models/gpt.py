"""GPT: symbols (N, T) to scores (N, classes, T), one for each position."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import dropout

from prefed.core.errors import PrefedError
from prefed.models import MODELS
from prefed.models.attention import TransformerBlock

SIZES = {"nano": (48, 3, 3), "micro": (128, 4, 4), "mini": (192, 6, 6), "small": (768, 12, 12)}
"""Width, layers and heads."""


@MODELS.register("gpt")
class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-norm blocks with causal attention, and a last layer that
    shares its weights with the embedding.

    size       "nano", "micro", "mini" or "small" (GPT-2's own): width, layers and heads
    width      of the embedding and of each block, in place of the size's
    layers     how many blocks, in place of the size's
    heads      of the attention, in place of the size's
    positions  "learned", or "rotary": turned queries and keys
    dropout    of the embedding, of the attention, and of what the blocks add
    """

    def __init__(
        self,
        inputs: Sequence[int],
        classes: int,
        size: Literal["nano", "micro", "mini", "small"] = "nano",
        width: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        positions: Literal["learned", "rotary"] = "learned",
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__()
        given = zip((width, layers, heads), SIZES[size], strict=True)
        width, layers, heads = (usual if own is None else own for own, usual in given)
        turns = positions == "rotary"
        if width % (2 * heads if turns else heads):
            each = "an even number for each of" if turns else "a multiple of"
            raise PrefedError(f"width {width} should be {each} the {heads} heads")
        self.dropout, self.embed = dropout, nn.Embedding(classes, width)
        self.positions = None if turns else nn.Parameter(torch.empty(inputs[0], width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, True, turns, dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.embed.weight
        self._first_weights(layers)

    def _first_weights(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.long())
        if self.positions is not None:
            h = h + self.positions[: x.shape[1]]
        if self.dropout and self.training:
            h = dropout(h, self.dropout)
        output: Tensor = self.head(self.norm(self.blocks(h))).transpose(1, 2)
        return output
