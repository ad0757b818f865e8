import torch
from torch import Tensor

from prefed.codecs.interface import CODECS, HUGE, TINY, Blockwise, Parts, blocks, unblock, uniform


@CODECS.register("int8")
class Int8(Blockwise):
    """Whole multiples of 1/127 of the largest magnitude in each block of 256, rounded at random.

    Unbiased; the error is less than one such step (or than 1.2e-38, where that is more). A block
    with a value that is not finite comes out as NaN.
    """

    block = 256

    def lengths(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"codes": (torch.int8, size), "scale": (torch.float32, -(-size // self.block))}

    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        rows = blocks(x, self.block)
        scale = rows.abs().amax(-1).div_(127).clamp_(min=TINY)
        units = unblock(rows / scale.unsqueeze(-1), x.shape[1])
        codes = uniform(noise).add_(units).floor_().clamp_(-127, 127).nan_to_num_(0.0)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        return {"codes": codes.to(torch.int8), "scale": scale}

    def decode_piece(self, parts: Parts, size: int) -> Tensor:
        rows = blocks(parts["codes"].to(torch.float32), self.block)
        return unblock((rows * parts["scale"].unsqueeze(-1)).clamp_(-HUGE, HUGE), size)

    def in_c(self) -> str:
        return """
static void block(float *restrict x, const int16_t *restrict noise)
{
    for (int half = 0; half < 2; half++, x += 256, noise += 256) {
        float scale = largest(x, 256) / 127;
        scale = scale < TINY ? TINY : scale;
        if (!isfinite(scale)) {
            fill(x, 256, NAN);
            continue;
        }
        for (int i = 0; i < 256; i++) {
            const float code = clamp(floorf(uniform(noise[i]) + x[i] / scale), -127, 127);
            x[i] = clamp(code * scale, -HUGE_, HUGE_);
        }
    }
}
"""
