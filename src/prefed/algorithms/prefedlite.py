from typing import ClassVar

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.prefed import PreFed
from prefed.codecs import CodecName


@ALGORITHMS.register("prefedlite")
class PreFedLite(PreFed):
    """PreFed for FedAvg's upload: 1.01 d floats instead of 3 d (docs/upload.md).

    The change of the weights goes up as bfloat16, P in 8 bits on a logarithmic scale, and m in
    8 bits. momentum="derived" leaves m out (0.76 d), which costs accuracy on hard tasks.
    """

    upload: CodecName = "bfloat16"
    P_codec: CodecName = "log8"
    m_codec: CodecName = "int8"
    """For momentum="average"."""

    contrib_options: ClassVar[dict[str, str]] = {
        "P_every": "prefedliteextended",
        "aggregate": "prefedliteextended",
    }
