"""The covariance rule as it runs on a CPU: the fast twin of covariance.py, equal up to rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.rules.covariance import Covariance
from prefed.rules.rule import BLOCK, State, grow_mass, scratch


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


@dataclass(frozen=True)
class LeanCovariance(Covariance):
    """Covariance that steps with g, in fewer passes over memory: equal up to rounding.

    Some clients at a time, whose vectors stay in the CPU's cache, and with one vector of scratch:
    g - m_new is beta1*(g - m_old), and sqrt(P/c) is sqrt(P) / sqrt(c) with c one number a client.
    """

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        mass = grow_mass(state["P_mass"], self.beta2) if "P_mass" in state else None
        rows = len(w) if w.dim() == 1 else max(1, BLOCK // w.shape[-1])
        for first in range(0, len(w), rows):
            w_, g_, m, P = (t[first : first + rows] for t in (w, g, state["m"], state["P"]))
            own = mass if mass is None or w.dim() == 1 else mass[first : first + rows]
            self._step(w_, g_, m, P, None if own is None else own.rsqrt(), lr)

    def _step(
        self, w: Tensor, g: Tensor, m: Tensor, P: Tensor, scale: Tensor | None, lr: float
    ) -> None:
        r = torch.sub(g, m, out=scratch(g))
        m.add_(r, alpha=1 - self.beta1)
        P.mul_(self.beta2).addcmul_(r, r, value=(1 - self.beta2) * self.beta1**2)
        root, tau = torch.sqrt(P, out=r), self.tau_for(P)
        if scale is None:
            root.add_(tau)
        elif isinstance(tau, Tensor):  # the one of sqrt(P), so that it is scaled with it
            torch.mul(root.add_(tau), scale, out=root)
        else:
            root.mul_(scale).add_(tau)
        w.addcdiv_(g, root, value=-lr)
