"""Reddi et al. 2021, Adaptive Federated Optimization: SGD on the clients, an adaptive server."""

from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.core.schedule import Rate
from prefed.rules import Adam, Rule, Yogi
from prefed.rules.adam import AdaGradM


class _FedOpt(Algorithm):
    client_lr: Rate = 0.05
    server_lr: Rate = 0.01
    beta1: Fraction = 0.9
    """The decay of m, the moving average of the pseudo-gradient."""
    tau: PositiveFloat = 1e-3
    """Added to sqrt(v), it bounds the step where v is small."""
    v0: NonNegativeFloat | None = None
    """The first v; tau^2 as in Reddi et al. if not given."""
    bias_correction: bool = False
    """Divide m and v by 1 - beta^t, as Adam does."""
    tau_inside: bool = False
    """sqrt(v + tau^2) in place of sqrt(v) + tau."""

    def moments(self) -> dict[str, Any]:
        return {
            "beta1": self.beta1,
            "tau": self.tau,
            "v0": self.tau**2 if self.v0 is None else self.v0,
            "bias_correction": self.bias_correction,
            "tau_inside": self.tau_inside,
        }


@ALGORITHMS.register("fedadagrad")
class FedAdagrad(_FedOpt):
    """Listing 1 of the paper; m is the pseudo-gradient itself unless beta1 is set."""

    beta1: Fraction = 0.0

    def server_rule(self) -> Rule:
        return AdaGradM(**self.moments())


@ALGORITHMS.register("fedadam")
class FedAdam(_FedOpt):
    """Reddi et al. 2021: SGD on the clients, Adam on the server."""

    beta2: Fraction = 0.99
    """The decay of v, the moving average of the squares."""

    def server_rule(self) -> Rule:
        return Adam(beta2=self.beta2, **self.moments())


@ALGORITHMS.register("fedyogi")
class FedYogi(_FedOpt):
    """Reddi et al. 2021: SGD on the clients, Yogi on the server, whose v moves more slowly down."""

    beta2: Fraction = 0.99
    """The decay of v, the moving average of the squares."""

    def server_rule(self) -> Rule:
        return Yogi(beta2=self.beta2, **self.moments())
