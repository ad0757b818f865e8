"""Next-character models: symbols (N, T) to scores (N, classes, T), one for each position."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prefed.models import MODELS
from prefed.models.attention import TransformerBlock


@MODELS.register("char-lstm")
class CharLSTM(nn.Module):
    """An embedding, LSTM layers and a linear layer: 8, 2 x 256 as in McMahan et al. 2017.

    embedding  numbers for each symbol
    hidden     the width of a layer
    layers     how many
    """

    def __init__(
        self, classes: int, embedding: int = 8, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x.long()))
        output: Tensor = self.head(states).transpose(1, 2)
        return output


@MODELS.register("char-transformer")
class CharTransformer(nn.Module):
    """A small GPT: learned positions, pre-norm blocks with causal attention, no dropout.

    width   of the embedding and of each block
    layers  how many blocks
    heads   of the attention
    """

    def __init__(
        self, inputs: Sequence[int], classes: int, width: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.positions = nn.Parameter(torch.zeros(inputs[0], width))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.long()) + self.positions[: x.shape[1]]
        output: Tensor = self.head(self.norm(self.blocks(h))).transpose(1, 2)
        return output
