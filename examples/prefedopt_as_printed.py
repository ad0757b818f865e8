"""Algorithm 3 of the paper to the letter, for study: it does not train.

    prefed run digits-noniid --set algorithm=examples.prefedopt_as_printed:AsPrinted \
        --set client_lr=0.1 --set server_lr=0.01

Two printed lines differ from prefed.PreFedOpt:

    m_t     = beta1*m + (beta1 - 1)*(Delta - m)      or m - (1 - beta1)*Delta: it never forgets
    w_{t+1} = w_t - eta * Delta / (sqrt(P_t) + tau)  with Delta = w_K - w: a step back uphill

`uphill=False` mends the sign alone and shows what the printed m does by itself: P measures the
distance to a sum of all changes so far and grows with the square of the rounds, so the steps
shrink as AdaGrad's do, for no reason that lies in the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import prefed
from prefed.core.layout import Layout
from prefed.rules.rule import State, accumulate


class AsPrinted(prefed.Algorithm):
    client_lr: float = 0.05
    server_lr: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    uphill: bool = True

    def server_rule(self) -> prefed.Rule:
        return PrintedRule(self.beta1, self.beta2, self.tau, -1.0 if self.uphill else 1.0)

    def pseudo_gradient(self, delta: Tensor, local_steps: int) -> Tensor:
        return delta.div_(local_steps)  # the printed Delta_t


@dataclass(frozen=True)
class PrintedRule(prefed.Rule):
    beta1: float
    beta2: float
    tau: float
    sign: float

    def fields(self, layout: Layout) -> dict[str, prefed.Field]:
        return {"m": prefed.Field((layout.size,)), "P": prefed.Field((layout.size,))}

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        delta, m, P = g, state["m"], state["P"]
        m.copy_(self.beta1 * m + (self.beta1 - 1) * (delta - m))
        accumulate(P, delta - m, self.beta2, "ema")
        w.addcdiv_(delta, P.sqrt().add_(self.tau), value=self.sign * lr)
