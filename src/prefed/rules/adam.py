"""The rules of adaptive federated optimisation (Reddi et al. 2021): AdaGrad, Adam and Yogi with
momentum, which differ in one line. Code bases disagree on three details; each is a field here."""

from abc import abstractmethod
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules.rule import RULES, Field, Fraction, Rule, State, accumulate, grow_mass


@dataclass(frozen=True)
class _Moments(Rule):
    """m = beta1*m + (1 - beta1)*g, v by the subclass, w -= lr * m / (sqrt(v) + tau).

    beta1             the decay of m, the moving average of the gradient
    tau               bounds the step where v is small
    v0                the first v
    bias_correction   divide m and v by 1 - beta^t, as Adam does
    tau_inside        sqrt(v + tau^2) in place of sqrt(v) + tau
    """

    beta1: Fraction = 0.9
    tau: PositiveFloat = 1e-3
    v0: NonNegativeFloat = 0.0
    bias_correction: bool = False
    tau_inside: bool = False

    def fields(self, layout: Layout) -> dict[str, Field]:
        vectors = {
            "m": Field((layout.size,)),
            "v": Field((layout.size,), self.v0, nonnegative=True),
        }
        mass = Field((1,), nonnegative=True)
        masses = {"m_mass": mass, "v_mass": mass} if self.bias_correction else {}
        return vectors | masses

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        m, v = state["m"], state["v"]
        m.lerp_(g, 1 - self.beta1)
        self.second_moment(v, g)
        if self.bias_correction:
            m = m / grow_mass(state["m_mass"], self.beta1)
            v = self.correct(v, state)
        root = v.add(self.tau**2).sqrt_() if self.tau_inside else v.sqrt().add_(self.tau)
        w.addcdiv_(m, root, value=-lr)

    @abstractmethod
    def second_moment(self, v: Tensor, g: Tensor) -> None: ...

    def correct(self, v: Tensor, state: State) -> Tensor:
        return v

    def preconditioner(self) -> tuple[str, float]:
        return "v", self.tau


@RULES.register("adagradm")
@dataclass(frozen=True)
class AdaGradM(_Moments):
    """v += g^2, with momentum: a sum has no bias to correct."""

    beta1: Fraction = 0.0

    def second_moment(self, v: Tensor, g: Tensor) -> None:
        accumulate(v, g, 0.0, "sum")


@RULES.register("adam")
@dataclass(frozen=True)
class Adam(_Moments):
    """m = beta1*m + (1 - beta1)*g, v = beta2*v + (1 - beta2)*g^2, w -= lr * m / (sqrt(v) + tau).

    beta2   the decay of v, the moving average of the squares
    """

    beta2: Fraction = 0.99

    def second_moment(self, v: Tensor, g: Tensor) -> None:
        accumulate(v, g, self.beta2, "ema")

    def correct(self, v: Tensor, state: State) -> Tensor:
        return v / grow_mass(state["v_mass"], self.beta2)

    def in_c(self) -> str:
        m_mass = "m_mass[0] += (1 - beta1) * (1 - m_mass[0])" if self.bias_correction else "1"
        v_mass = "v_mass[0] += (1 - beta2) * (1 - v_mass[0])" if self.bias_correction else "1"
        root = "SQRT(share * v[i] + tau * tau)" if self.tau_inside else "SQRT(share * v[i]) + tau"
        return f"""
    const real beta1 = {self.beta1!r}, beta2 = {self.beta2!r}, tau = {self.tau!r};
    const real step = lr / ({m_mass}), share = 1 / ({v_mass});
    for (int64_t i = 0; i < SIZE; i++) {{
        m[i] = lerp(m[i], g[i], 1 - beta1);
        v[i] = beta2 * v[i] + (1 - beta2) * (g[i] * g[i]);
        w[i] -= step * m[i] / ({root});
    }}"""


@RULES.register("yogi")
@dataclass(frozen=True)
class Yogi(Adam):
    """Adam, but v -= (1 - beta2) * g^2 * sign(v - g^2)."""

    def second_moment(self, v: Tensor, g: Tensor) -> None:
        squared = g * g
        v.addcmul_(squared, (v - squared).sign_(), value=-(1 - self.beta2))
