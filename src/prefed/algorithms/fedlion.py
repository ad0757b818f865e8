from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.sharing import Policy, average
from prefed.core.schedule import Rate
from prefed.rules import Fraction, Rule
from prefed.rules.lion import Lion


@ALGORITHMS.register("fedlion")
class FedLion(Algorithm):
    """Tang and Chang 2024: Lion on the clients, m averaged with the weights.

        w -= lr * sign(beta1*m + (1 - beta1)*g),   m = beta2*m + (1 - beta2)*g

    The change of a client is lr times whole numbers from -K to K, which the paper sends in
    log2(2K + 1) bits each. Here it goes up as floats (upload 2d), and the weights are the same up
    to rounding. beta2 = 0.99 is Lion's; the paper's code takes 0.9 if it is told nothing. Its
    weight decay is our decoupled_weight_decay.
    """

    client_lr: Rate = 0.001
    beta1: Fraction = 0.9
    """The share of m in a step."""
    beta2: Fraction = 0.99
    """The decay of m, the moving average of the gradient."""

    def client_rule(self) -> Rule:
        return Lion(self.beta1, self.beta2)

    def sharing(self) -> dict[str, Policy]:
        return {"m": average()}
