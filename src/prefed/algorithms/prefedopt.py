from typing import Literal

from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.fedavg import Fraction
from prefed.algorithms.preconditioned import Preconditioned
from prefed.core.schedule import Rate
from prefed.rules import Rule


@ALGORITHMS.register("prefedopt")
class PreFedOpt(Preconditioned):
    """Algorithm 3 of the paper: SGD on the clients, the covariance rule on the server.

    Two lines are not as printed. The pseudo-gradient is minus the mean change (the printed sign
    walks uphill), and m is a moving average (the printed m never forgets);
    examples/prefedopt_as_printed.py is the listing to the letter.

    per_step divides the mean change by K, as printed. With many local steps sqrt(P) then
    falls far below tau and the rule becomes SGD with the rate server_lr / tau: watch
    `adaptive_share` in the history, and lower tau or set per_step=False.
    """

    client_lr: Rate = 0.05
    server_lr: Rate = 0.002
    beta2: Fraction = 0.99
    per_step: bool = True
    """Divide the mean change by the number of local steps."""
    step_with: Literal["delta", "m"] = "delta"
    """The server moves along the pseudo-gradient itself, or along its moving average m."""

    def server_rule(self) -> Rule:
        return self.covariance(step_with="m" if self.step_with == "m" else "g")

    def pseudo_gradient(self, delta: Tensor, local_steps: float) -> Tensor:
        return delta.div_(-local_steps if self.per_step else -1)
