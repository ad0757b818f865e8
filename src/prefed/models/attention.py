"""The block that all transformers here are made of."""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention


class TransformerBlock(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).

    causal   a position sees those before it and itself
    rotary   positions turn queries and keys (Su et al. 2021); without it they are not known here
    dropout  of the attention and of what is added to x
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = True,
        rotary: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary, self.dropout = heads, causal, rotary, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = turned(q), turned(k)
        share = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=share)
        mixed = self.out(mixed.transpose(1, 2).reshape(count, length, width))
        x = x + self._dropped(mixed)
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout) if self.dropout and self.training else x


def turned(x: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + n/2}) of (..., T, n) turned by its position times 10000^(-2i/n)."""
    length, size = x.shape[-2:]
    speeds = 10000.0 ** (-torch.arange(0, size, 2, device=x.device, dtype=x.dtype) / size)
    angles = torch.arange(length, device=x.device, dtype=x.dtype).unsqueeze(1) * speeds
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
