from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from prefed.algorithms import ALGORITHMS, Policy
from prefed.algorithms.fedpm import MIXED_BY, mix, unmix
from prefed.algorithms.prefed import PreFed
from prefed.algorithms.prefedlite import PreFedLite
from prefed.rules import State


@ALGORITHMS.register("prefedextended")
class PreFedExtended(PreFed):
    """PreFed with P sent in some rounds only, and with another mean. It is made by giving PreFed
    one of these options.

    aggregate="sqrtP" weights each coordinate of each client by the inverse of its step size:
    sum of s_i*w_i over sum of s_i, s_i = sqrt(P_i) + tau, with the P_i of the upload. Where P is
    not sent in a round, that round takes the plain mean. With P in every round it is FedPM.
    """

    contrib_options: ClassVar[dict[str, str]] = {}

    P_every: PositiveInt = 1
    """P is sent in the first two rounds, and then in each round whose number is a multiple."""
    aggregate: Literal["mean", "sqrtP"] = "mean"

    @model_validator(mode="after")
    def _is_diagonal(self) -> "PreFedExtended":
        if self.shape != "diagonal" and self.aggregate == "sqrtP":
            raise ValueError('aggregate="sqrtP" needs shape="diagonal"')
        return self

    def sharing(self) -> dict[str, Policy]:
        found = super().sharing()
        return found | {n: found[n].in_rounds(self.P_every) for n in ("P", "P_mass")}

    @property
    def mixes(self) -> bool:
        return self.aggregate == "sqrtP"

    @property
    def needs_one_tau(self) -> bool:
        return self.mixes or super().needs_one_tau

    def before_mean(self, values: State) -> State:
        if self.aggregate == "mean" or "P" not in values:
            return values
        return mix(values, self.root(values))

    def after_mean(self, mean: State) -> State:
        return unmix(mean) if MIXED_BY in mean else mean


@ALGORITHMS.register("prefedliteextended")
class PreFedLiteExtended(PreFedExtended, PreFedLite):
    """PreFedLite with the options of PreFedExtended."""
