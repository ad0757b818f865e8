from torch import Tensor

from prefed.algorithms.algorithm import Algorithm
from prefed.algorithms.sharing import Policy, derived
from prefed.rules import State

DIRECTION = "direction"
"""The field of a client rule with the mean direction of the last round."""


class Directed(Algorithm):
    """What FedCM, FedLADA and FedAdamW have in common: local steps that also go along the direction
    in which all clients went in the last round,

        direction = (w_t - mean of w_i) / (eta_t * K),

    in the units of a gradient, so that it is right when the step size changes. It comes down with
    the weights and never goes up; before the first round it is zero. Where clients take unequally
    many steps (local_epochs), K is their mean. With `align` beside it, what clients moved by
    together is taken off the change first, and eta_t is the step size of the rule's own part.

    `align` is the same in the units of weights, beside any rule: with a step size that stands still
    and equally many steps there is no difference.
    """

    def sharing(self) -> dict[str, Policy]:
        return {DIRECTION: derived()}

    def derive(self, change: Tensor, shared: State, lr: float, local_steps: float) -> State:
        return {DIRECTION: change / (-lr * local_steps)} if lr else {}
