from typing import ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.prefed import PreFed
from prefed.rules import State

MIXED_BY = "mixed_by"
"""Among the values that are averaged: what a client's change is multiplied with."""


@ALGORITHMS.register("fedpm")
class FedPM(PreFed):
    """Ishii et al. 2025: clients are mixed by their preconditioners. With S_i = sqrt(P_i) + tau,

        w = (mean of S_i)^(-1) * (mean of S_i * w_i)

    After one local step this is a step of all clients together: the mean of their directions,
    divided by the mean of their S_i.

    The mixing is the paper's, the clients are PreFed's: P is the covariance of the gradients and
    comes down again, and the step goes along m. In the paper P_i is the Hessian, or for networks
    the covariance of each layer's input, which begins anew in each round; these are not here.

    shape is "diagonal" or "full". The mean of the S_i of Kronecker products is no such product.
    """

    contrib_options: ClassVar[dict[str, str]] = {}

    @model_validator(mode="after")
    def _can_mix(self) -> "FedPM":
        if self.shape not in ("diagonal", "full"):
            raise ValueError(f'shape="{self.shape}": clients are mixed by "diagonal" or "full"')
        if self.P == "derived":
            raise ValueError('P="derived": clients are mixed by their own P, which has to be sent')
        return self

    @property
    def mixes(self) -> bool:
        return True

    @property
    def needs_one_tau(self) -> bool:
        return True

    def before_mean(self, values: State) -> State:
        return mix(values, self.root(values))

    def after_mean(self, mean: State) -> State:
        return unmix(mean)


def mix(values: State, S: Tensor) -> State:
    """What is averaged: S times the change. S is a diagonal or a matrix."""
    change = values["weights"]
    product = S * change if S.dim() == change.dim() else (S @ change.unsqueeze(-1)).squeeze(-1)
    return values | {"weights": product, MIXED_BY: S}


def unmix(mean: State) -> State:
    """The mixed change, from these means."""
    S, change = mean.pop(MIXED_BY), mean["weights"]
    if S.dim() == change.dim():
        change.div_(S)
    else:
        change.copy_(torch.linalg.solve(S.double(), change.double()))
    return mean
