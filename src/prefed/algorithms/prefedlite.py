from __future__ import annotations

from typing import Literal

from prefed.algorithms.base import ALGORITHMS
from prefed.algorithms.prefed import PreFed
from prefed.codecs import CodecName


@ALGORITHMS.register("prefedlite")
class PreFedLite(PreFed):
    """PreFed at no more than FedAvg's upload, the recommended setting of docs/upload.md.

    The change of the weights goes up as bfloat16 and P in 8 bits on a logarithmic scale; m takes
    8 bits more.
    """

    momentum: Literal["average", "reset", "keep", "derived"] = "average"
    upload: CodecName = "bfloat16"
    P_codec: CodecName = "log8"
    m_codec: CodecName = "int8"
