"""The paper's rule: precondition with the variance of the gradient around its running mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prefed.core.layout import Layout
from prefed.core.registry import Registry
from prefed.rules.rule import Field, Rule, State, accumulate, grow_mass, scratch

Accumulate = Literal["ema", "sum"]

SHAPES: Registry[type[Covariance]] = Registry("shape", "prefed.rules")
"""What is kept of the covariance matrix."""


@SHAPES.register("diagonal")
@dataclass(frozen=True)
class Covariance(Rule):
    """Algorithm 2 of the paper, line by line; P is the diagonal of the covariance.

        m = beta1*m + (1 - beta1)*g
        P = beta2*P + (1 - beta2)*(g - m)^2        (or P += (g - m)^2)
        w = w - lr * m / (sqrt(P) + tau)

    m is updated before P, so g - m is beta1*(g - m_old), as printed. PreFedOpt steps with g
    in place of m. AdaBelief is this rule with bias correction (and an epsilon inside the root).
    Without bias correction the first steps are damped for beta1 = beta2 = .9, and overshoot
    about twofold near step 10 for beta2 = .99.
    """

    beta1: float = 0.9
    beta2: float = 0.9
    tau: float = 1e-3
    accumulate: Accumulate = "ema"
    step_with: Literal["m", "g"] = "m"
    bias_correction: bool = False

    def fields(self, layout: Layout) -> dict[str, Field]:
        P = Field((layout.size,), nonnegative=True)
        return {"m": Field((layout.size,)), "P": P} | self.masses()

    def masses(self) -> dict[str, Field]:
        """The numbers that bias correction needs (see grow_mass)."""
        if not self.bias_correction:
            return {}
        m_mass = {"m_mass": Field((1,), nonnegative=True)} if self.step_with == "m" else {}
        P_mass = {"P_mass": Field((1,), nonnegative=True)} if self.accumulate == "ema" else {}
        return m_mass | P_mass

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m, P = state["m"], state["P"]
        m.lerp_(g, 1 - self.beta1)
        accumulate(P, g - m, self.beta2, self.accumulate)
        u, P = self.corrected(g, state)
        w.addcdiv_(u, P.sqrt().add_(self.tau), value=-lr)

    def corrected(self, g: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """What the step moves along, and P, both after bias correction if it is asked for."""
        u, P = (state["m"] if self.step_with == "m" else g), state["P"]
        if "m_mass" in state:
            u = u / grow_mass(state["m_mass"], self.beta1)
        if "P_mass" in state:
            mass = grow_mass(state["P_mass"], self.beta2)
            P = P / mass.view(*mass.shape, *[1] * (P.dim() - mass.dim()))
        return u, P

    def preconditioner(self) -> tuple[str, float]:
        return "P", self.tau

    def fast(self, w: Tensor) -> Rule:
        plain = self.accumulate == "ema" and self.step_with == "m" and not self.bias_correction
        return _Fused(**vars(self)) if plain and w.device.type == "cpu" and self.beta1 > 0 else self


@dataclass(frozen=True)
class _Fused(Covariance):
    """Covariance in two kernels a block, for whole rounds on a CPU: equal up to rounding.

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
