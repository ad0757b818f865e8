"""Vectors that are sent and come back, in C: one pass over memory instead of one for each operation
of torch, with the same bits. Done where clients train in C: nobody else waits for a compiler."""

import ctypes
from functools import cache, partial
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.core.c_programs import CannotCompile, compiled, pointer
from prefed.core.draws import Noise, philox
from prefed.core.hands import ALONE, Hands

WORTH_IT = 1 << 14
"""Numbers from which on it is faster than it is cumbersome."""


def sent_in_c(lines: str, x: Tensor, noise: Noise, hands: Hands = ALONE) -> bool:
    """Send the rows of x by the lines of a codec; false, and nothing was done, if it cannot be."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.stride(1) == 1
    if not fits or x.numel() < WORTH_IT or (send := _program(lines)) is None:
        return False
    clients = np.array(noise.clients, np.uint64)

    def part(rows: slice) -> None:
        own = x[rows]
        send(
            *map(ctypes.c_int64, own.shape), pointer(own), ctypes.c_int64(x.stride(0)),
            noise.key.ctypes, ctypes.c_uint64(noise.round), clients[rows].ctypes,
        )  # fmt: skip

    hands.work([partial(part, rows) for rows in hands.parts(len(x))])
    return True


@cache
def _program(lines: str) -> Any:
    """None where there is no compiler, or none that takes it: torch has the same bits."""
    source = files("prefed.codecs").joinpath("sent.c").read_text()
    try:
        return compiled(f"{philox()}\n{source}\n{lines}", "-ffp-contract=off").sent
    except CannotCompile:
        return None
