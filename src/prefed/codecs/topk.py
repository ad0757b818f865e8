import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.codecs.interface import CODECS, Codec, Form, Noise, Parts, vector
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout


@CODECS.register("topk")
@dataclass(frozen=True)
class TopK(Codec):
    """The largest magnitudes, `share` of all, each with its place; the others are zero.

    Biased, with error feedback: a client keeps what it did not send and adds it to its next
    change. A NaN counts as largest.

    share  of the numbers that is sent
    """

    feedback = True

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("the share should be greater than 0 and at most 1")

    def count(self, layout: Layout) -> int:
        return math.ceil(self.share * layout.size)

    def form(self, layout: Layout, like: Tensor) -> Form:
        kept = (self.count(layout),)
        return {"values": (torch.float32, kept), "places": (torch.int32, kept)}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        places = x.abs().topk(self.count(layout), dim=1, sorted=False).indices
        return {"values": vector(x.gather(1, places)), "places": places.to(torch.int32)}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        places = parts["places"].long()
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < layout.size:
            raise PrefedError("a message of codec topk names a place that does not exist")
        x = like.new_zeros(len(places), layout.size)
        return x.scatter_(1, places, parts["values"].to(like.dtype))
