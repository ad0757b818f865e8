from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from prefed.algorithms.algorithm import Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.sharing import Policy, average
from prefed.codecs import CodecName
from prefed.core.patterns import Patterns
from prefed.core.schedule import Rate


class ByLayer(Algorithm):
    """What algorithms share that average m and P and step otherwise for weight matrices, embeddings
    and vectors."""

    client_lr: Rate = 0.02
    beta1: Fraction = 0.95
    """The decay of m, the moving average of the gradient."""
    beta2: Fraction = 0.999
    """The decay of P, the moving average of the squared distance from m."""
    tau_relative: PositiveFloat = 0.3
    """tau as a share of the root mean square of sqrt(P). Large values make the step Muon's."""
    iterations: NonNegativeInt = 5
    """Of Newton and Schulz; with 0 the momentum is only divided by its norm."""
    plain: Patterns = ()
    """Patterns of names: parameters that are trained as embeddings. Those of embedding layers are,
    anyway, and those of no layer of torch's that have a name such as "positions"."""
    plain_lr: PositiveFloat = 0.1
    """The step size of vectors, as a share of client_lr."""
    embedding_lr: PositiveFloat = 0.3
    """The step size of embeddings, as a share of client_lr."""
    clip_relative: PositiveFloat | None = 10.0
    """A gradient that is more than this many times as long as m and P lead to expect is scaled down
    to that: both would remember one that explodes for long. None for any length."""
    m_codec: CodecName = "exact"
    """The codec of m on its way to the server."""
    P_codec: CodecName = "exact"
    """The codec of P on its way to the server."""
    mean_of_rounds: NonNegativeFloat | None = 4.0
    """The model is the mean of the global weights over rounds, later ones counting more; None for
    the last weights."""

    @property
    def rule_options(self) -> dict[str, Any]:
        """Those that their rules have by the same names."""
        names = (
            "beta1", "beta2", "tau_relative", "iterations", "plain", "plain_lr", "embedding_lr",
            "clip_relative",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def sharing(self) -> dict[str, Policy]:
        vectors = {"m": average(codec=self.m_codec), "P": average(codec=self.P_codec)}
        return vectors | {"m_mass": average(), "P_mass": average()}
