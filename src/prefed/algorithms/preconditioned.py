from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from prefed.algorithms.algorithm import Algorithm
from prefed.algorithms.fedavg import Fraction
from prefed.rules import Rule
from prefed.rules.covariance import Accumulate
from prefed.rules.covariance_block import Blocks
from prefed.rules.covariance_shapes import Shape, covariance


class Preconditioned(Algorithm):
    """What PreFed and PreFedOpt have in common: the options of the covariance rule."""

    beta1: Fraction = 0.9
    """The decay of m, the moving average of the gradient."""
    beta2: Fraction = 0.9
    """The decay of P, the moving average of the squared distance from m."""
    tau: PositiveFloat = 1e-3
    """Added to sqrt(P), it bounds the step where P is small."""
    tau_relative: PositiveFloat | None = None
    """In place of tau: this share of the root mean square of sqrt(P) over all weights, in each step
    anew. It has no units, so that the same value serves tasks with large and small gradients."""
    accumulate: Accumulate = "ema"
    """P is an exponential moving average ("ema") or a "sum"."""
    bias_correction: bool = False
    """Divide m and P by the weight that they have gathered."""
    shape: Shape = "diagonal"
    """What is kept of the covariance: "diagonal", "full", "block" or "kronecker"."""
    refresh: PositiveInt = 1
    """The number of steps (on a server: rounds) between two computations of the inverse root."""
    blocks: Blocks = "row"
    """Of shape="block": one for each output "row", or one for each "tensor"."""
    largest_side: PositiveInt = 256
    """Of shape="kronecker": the factor of a longer side of a matrix is its diagonal."""

    def covariance(self, step_with: Literal["m", "g"]) -> Rule:
        return covariance(
            self.beta1,
            self.beta2,
            self.tau,
            self.accumulate,
            step_with,
            self.bias_correction,
            self.shape,
            self.refresh,
            self.blocks,
            self.largest_side,
            self.tau_relative,
        )
