from typing import ClassVar, Literal

from pydantic import model_validator
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.preconditioned import Preconditioned
from prefed.algorithms.sharing import Policy, average, derived, keep, reset
from prefed.codecs import CodecName, codec
from prefed.core.schedule import Rate
from prefed.rules import Covariance, Rule, State


@ALGORITHMS.register("prefed")
class PreFed(Preconditioned):
    """Algorithm 2 of the paper: the covariance rule on the clients, P averaged with the weights.

    The listing starts each client from the server's m, but never says how the server comes by it.
    `momentum` names the three readings: "average" it like P (upload 3d), "reset" it in each
    round, or let each client "keep" its own (upload 2d). "derived" is a fourth: the server takes
    the m that would have made the clients' mean change in K equal steps (upload 2d):

        m = (sqrt(P) + tau) * (w_t - w_{t+1}) / (eta*K)

    P_codec and m_codec shorten the upload of P and m (docs/upload.md).
    """

    client_lr: Rate = 0.001
    momentum: Literal["average", "reset", "keep", "derived"] = "average"
    """What happens to m at the end of a round."""
    P_codec: CodecName = "exact"
    """The codec of P on its way to the server."""
    m_codec: CodecName = "exact"
    """That of m, for momentum="average"."""

    contrib_options: ClassVar[dict[str, str]] = {
        "P_every": "prefedextended",
        "aggregate": "prefedextended",
    }

    @model_validator(mode="after")
    def _fits(self) -> "PreFed":
        if self.shape != "diagonal" and self.momentum == "derived":
            raise ValueError('momentum="derived" needs shape="diagonal"')
        if not codec(self.m_codec).signed:
            raise ValueError(f"m_codec={self.m_codec}: m has both signs; take int8 or bfloat16")
        return self

    def client_rule(self) -> Rule:
        return self.covariance(step_with="m")

    def sharing(self) -> dict[str, Policy]:
        momentum = {"average": average, "reset": reset, "keep": keep, "derived": derived}
        mass = momentum[self.momentum]()
        return {
            "m": average(codec=self.m_codec) if self.momentum == "average" else mass,
            "m_mass": mass,
            "P": average(codec=self.P_codec),
            "P_mass": average(),
        }

    def derive(self, change: Tensor, shared: State, lr: float, local_steps: float) -> State:
        if lr == 0:  # nothing moved, and nothing is learnt
            return {}
        m = self.root(shared).mul_(change).div_(-lr * local_steps)
        # An estimate of m itself, not of a sum that has yet to grow: it needs no correction.
        return {"m": m, "m_mass": m.new_ones(1)}

    def root(self, state: State) -> Tensor:
        """sqrt(P) + tau, as the client rule divides by it."""
        P = state["P"]
        if "P_mass" in state:
            mass = state["P_mass"]
            P = P / mass.view(*mass.shape, *[1] * (P.dim() - mass.dim()))
        rule = self.client_rule()
        assert isinstance(rule, Covariance)
        return rule.root(P)
