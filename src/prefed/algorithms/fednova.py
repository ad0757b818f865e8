from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS
from prefed.algorithms.fedavg import FedAvg
from prefed.rules import State


@ALGORITHMS.register("fednova")
class FedNova(FedAvg):
    """Wang et al. 2020: FedAvg for clients that take unequally many local steps (local_epochs).

    The change of a client is divided by the number a of gradients in it, and the mean multiplied by
    the mean of a, so that clients with more steps do not pull the optimum to themselves:

        w += mean(a) * mean(change / a)

    a is the number of local steps, or with client_momentum the sum of the coefficients that the
    momentum gives to the gradients. With equally many steps it is FedAvg.
    """

    @property
    def mixes(self) -> bool:
        return True

    def gradients(self, steps: Tensor) -> Tensor:
        """How often a gradient of length one is in the change after so many steps."""
        rho = self.client_momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def before_mean(self, values: State) -> State:
        change, a = values["weights"], self.gradients(values["local_steps"])
        return values | {"weights": change / a.to(change.dtype), "gradients": a}

    def after_mean(self, mean: State) -> State:
        mean["weights"].mul_(mean.pop("gradients").to(mean["weights"].dtype))
        return mean
