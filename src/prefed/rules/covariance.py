"""The paper's rule: precondition with the variance of the gradient around its running mean."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from prefed.core.layout import Layout
from prefed.core.registry import Registry
from prefed.rules.rule import Field, Rule, State, accumulate, grow_mass, mean_of_last

Accumulate = Literal["ema", "sum"]

SHAPES: "Registry[type[Covariance]]" = Registry("shape", "prefed.rules")
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

    With tau_relative, tau is that share of the root mean square of sqrt(P) over all weights of a
    client (or of the server), in each step anew: it has the units of the gradients, as sqrt(P).
    While P is zero everywhere, tau is as given.
    """

    beta1: float = 0.9
    beta2: float = 0.9
    tau: float = 1e-3
    accumulate: Accumulate = "ema"
    step_with: Literal["m", "g"] = "m"
    bias_correction: bool = False
    tau_relative: float | None = field(default=None, kw_only=True)

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
        w.addcdiv_(u, self.root(P), value=-lr)

    @property
    def in_parts(self) -> bool:
        return self.elementwise and self.tau_relative is None

    @property
    def counts_all(self) -> bool:
        return self.tau_relative is not None

    def root(self, P: Tensor) -> Tensor:
        """sqrt(P) + tau, for one holder or for a block of clients."""
        return P.sqrt().add_(self.tau_for(P))

    def tau_for(self, P: Tensor) -> Tensor | float:
        """tau for this P; a relative one with a dimension of length 1 for the coordinates."""
        if self.tau_relative is None:
            return self.tau
        relative = self.mean_variance(P).sqrt_().mul_(self.tau_relative)
        return torch.where(relative > 0, relative, self.tau).unsqueeze(-1)

    def mean_variance(self, P: Tensor) -> Tensor:
        """The mean of the diagonal: the square of the root mean square of sqrt(P)."""
        return mean_of_last(P)

    def corrected(self, g: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """What the step moves along, and P, both after bias correction if it is asked for."""
        u, P = (state["m"] if self.step_with == "m" else g), state["P"]
        if "m_mass" in state:
            u = u / grow_mass(state["m_mass"], self.beta1)
        if "P_mass" in state:
            mass = grow_mass(state["P_mass"], self.beta2)
            P = P / mass.view(*mass.shape, *[1] * (P.dim() - mass.dim()))
        return u, P

    def written(self) -> dict[str, Any]:
        return super().written() | {"name": "covariance", "shape": SHAPES.name_of(type(self))}

    def preconditioner(self) -> tuple[str, float]:
        return "P", self.tau

    def damping(self, P: Tensor, mass: float = 1.0) -> float:
        tau = float(self.tau_for(self.with_clients(P)))
        return tau if self.tau_relative is None else tau / mass**0.5

    def with_clients(self, P: Tensor) -> Tensor:
        """P of one holder as `mean_variance` takes it."""
        return P

    def in_c(self) -> str:
        ema, masses = self.accumulate == "ema", self.masses()
        P = "beta2 * P[i] + (1 - beta2) * (r * r)" if ema else "P[i] + r * r"
        m_mass = "m_mass[0] += (1 - beta1) * (1 - m_mass[0])" if "m_mass" in masses else "1"
        P_mass = "P_mass[0] += (1 - beta2) * (1 - P_mass[0])" if "P_mass" in masses else "1"
        between = f"""}}
    const real relative = {self.tau_relative!r} * SQRT(share * (total(P, SIZE) / SIZE));
    if (relative > 0) tau = relative;
    for (int64_t i = 0; i < SIZE; i++) {{"""
        return f"""
    const real beta1 = {self.beta1!r}, beta2 = {self.beta2!r};
    const real step = lr / ({m_mass}), share = 1 / ({P_mass});
    real tau = {self.tau!r};
    for (int64_t i = 0; i < SIZE; i++) {{
        m[i] = lerp(m[i], g[i], 1 - beta1);
        real r = g[i] - m[i];
        P[i] = {P};
    {"" if self.tau_relative is None else between}
        w[i] -= step * {self.step_with}[i] / (SQRT(share * P[i]) + tau);
    }}"""

    def fused(self, w: Tensor) -> Rule:
        from prefed.rules.covariance_fused import FusedCovariance, LeanCovariance

        if self.accumulate != "ema" or w.device.type != "cpu" or self.beta1 == 0:
            return self
        if self.step_with == "g":
            return LeanCovariance(**vars(self))
        plain = not self.bias_correction and self.tau_relative is None
        return FusedCovariance(**vars(self)) if plain else self
