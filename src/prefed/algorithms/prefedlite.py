from __future__ import annotations

from typing import Literal

from prefed.algorithms.base import ALGORITHMS
from prefed.algorithms.prefed import PreFed
from prefed.codecs import CodecName


@ALGORITHMS.register("prefedlite")
class PreFedLite(PreFed):
    """PreFed for less than FedAvg's upload: 0.76 d floats (docs/upload.md).

    The change of the weights goes up as bfloat16, P in 8 bits on a logarithmic scale, and m not
    at all: the server works it out.
    """

    momentum: Literal["average", "reset", "keep", "derived"] = "derived"
    upload: CodecName = "bfloat16"
    P_codec: CodecName = "log8"
    m_codec: CodecName = "int8"
    """For momentum="average"."""
