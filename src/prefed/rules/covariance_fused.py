"""The covariance rule as it runs on a CPU: the fast twin of covariance.py, equal up to rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.rules.covariance import Covariance
from prefed.rules.rule import State, scratch


@dataclass(frozen=True)
class FusedCovariance(Covariance):
    """Covariance in two kernels, for whole rounds on a CPU: equal up to rounding.

    torch has a fused kernel for Adam and none for this rule, but with r = g - m_old the rule is

        m_new = m_old + (1 - beta1)*r,     P = beta2*P + (1 - beta2)*beta1^2*r^2,

    and Adam's kernel fed with r does just that in other units: V = P / beta1^2, and E = m / c with
    c = 1 + k*(1 - beta1) after k steps, because then m_new / c_new = b*E + (1 - b)*r for
    b = c / c_new. `begin` and `finish` change the units once a round; a step is a subtraction
    in cache and one pass over memory. A step count of 1e20 turns Adam's bias correction off.
    """

    def begin(self, w: Tensor, state: State) -> None:
        state["P"].div_(self.beta1**2)

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        E, V = state["m"], state["P"]
        c, c_new = self.scale(k), self.scale(k + 1)
        r = torch.sub(g, E, alpha=c, out=scratch(g))
        torch._fused_adam_(
            [w], [r], [E], [V], [], [_NO_BIAS_CORRECTION],
            lr=lr * c_new / self.beta1, beta1=c / c_new, beta2=self.beta2,
            weight_decay=0.0, eps=self.tau / self.beta1, amsgrad=False, maximize=False,
        )  # fmt: skip

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        state["m"].mul_(self.scale(steps))
        state["P"].mul_(self.beta1**2)

    def scale(self, k: int) -> float:
        return 1 + k * (1 - self.beta1)


_NO_BIAS_CORRECTION = torch.tensor(1e20)
