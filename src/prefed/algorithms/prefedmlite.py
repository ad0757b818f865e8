from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.prefedm import PreFedM
from prefed.codecs import CodecName


@ALGORITHMS.register("prefedmlite")
class PreFedMLite(PreFedM):
    """PreFedM for less than FedAvg's upload: 0.76 d floats instead of 2 d (docs/upload.md).

    The change of the weights goes up as bfloat16, and P in 8 bits on a logarithmic scale.
    """

    upload: CodecName = "bfloat16"
    P_codec: CodecName = "log8"
