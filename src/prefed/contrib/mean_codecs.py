"""A mean in place of many numbers, for P: a few hundred numbers for a whole network.

Both are projections: what is kept (the means) is exact, and what is lost has the mean zero, so
that error feedback would add nothing. Zero is decoded only where a whole group is zero.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from prefed.codecs.interface import CODECS, Codec, Form, Noise, Parts, vector
from prefed.core.layout import Entry, Layout


class Means(Codec):
    signed = False

    @abstractmethod
    def groups(self, entry: Entry) -> int:
        """How many means a tensor has: one for each part of its first dimension, or one."""

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"means": (torch.float32, (sum(map(self.groups, layout.entries)),))}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        x = x.contiguous()
        means = []
        for entry in layout.entries:
            rows = entry.view(x).reshape(len(x), self.groups(entry), -1)
            # In units of the largest, so that the sum of huge values is not infinite.
            unit = rows.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
            means.append((rows / unit).mean(-1).mul_(unit.squeeze(-1)))
        return {"means": vector(torch.cat(means, 1))}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        means = parts["means"]
        x = means.new_empty(len(means), layout.size, dtype=like.dtype)
        split = means.split([self.groups(e) for e in layout.entries], dim=1)
        for entry, part in zip(layout.entries, split, strict=True):
            tensor = entry.view(x)
            tensor.copy_(
                part.view(len(x), *([-1] if entry.shape else []), *[1] * (tensor.dim() - 2))
            )
        return x


@CODECS.register("row")
class Row(Means):
    """The mean over each output row: over a row of a matrix, over the filter of one output channel
    of a convolution. Numbers of vectors (biases, scales of norms) stay as they are."""

    def groups(self, entry: Entry) -> int:
        return entry.shape[0] if entry.shape else 1


@CODECS.register("tensor")
class PerTensor(Means):
    """The mean over each tensor of the model."""

    def groups(self, entry: Entry) -> int:
        return 1
