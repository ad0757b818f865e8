from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.prefedc import PreFedC
from prefed.codecs import CodecName


@ALGORITHMS.register("prefedclite")
class PreFedCLite(PreFedC):
    """PreFedC for FedAvg's upload: 1.01 d floats instead of 3 d (docs/upload.md).

    The change of the weights goes up as bfloat16, P in 8 bits on a logarithmic scale, and m in
    8 bits.
    """

    upload: CodecName = "bfloat16"
    m_codec: CodecName = "int8"
    P_codec: CodecName = "log8"
