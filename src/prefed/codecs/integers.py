from __future__ import annotations

import torch
from torch import Tensor

from prefed.codecs.base import (
    CODECS,
    HUGE,
    TINY,
    Codec,
    Form,
    Noise,
    Parts,
    blocks,
    count,
    flat,
    uniform,
    vector,
)
from prefed.layout import Layout

BLOCK = 256


@CODECS.register("int8")
class Int8(Codec):
    """Whole multiples of 1/127 of the largest magnitude in each block of 256, rounded at random.

    Unbiased; the error is less than one such step (or than 1.2e-38, where that is more).
    """

    def form(self, layout: Layout, like: Tensor) -> Form:
        return {
            "codes": (torch.int8, (layout.size,)),
            "scale": (torch.float32, (count(layout, BLOCK),)),
        }

    def encode(self, x: Tensor, layout: Layout, noise: Noise) -> Parts:
        rows = blocks(vector(x), BLOCK)
        scale = rows.abs().amax(-1).div_(127).clamp_(min=TINY)
        units = flat(rows / scale.unsqueeze(-1), layout)
        u = uniform(noise(layout.size).to(x.device))
        codes = u.add_(units).floor_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
        return {"codes": codes, "scale": torch.where(scale.isfinite(), scale, torch.nan)}

    def decode(self, parts: Parts, layout: Layout, like: Tensor) -> Tensor:
        rows = blocks(parts["codes"].to(torch.float32), BLOCK).mul_(parts["scale"].unsqueeze(-1))
        return flat(rows.clamp_(-HUGE, HUGE), layout).to(like.dtype)
