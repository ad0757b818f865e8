from torch import Tensor

from prefed.codecs.interface import CODECS, Codec, Form, Noise, Parts
from prefed.core.layout import Layout


@CODECS.register("exact")
class Exact(Codec):
    """The values as they are, of any shape."""

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {"values": (like.dtype, tuple(like.shape))}

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        return {"values": x}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        return parts["values"]
