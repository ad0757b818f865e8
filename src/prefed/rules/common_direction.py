"""One direction for all clients, with singular values near one, and each client's own distance from
its running mean beside it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from prefed.core.layout import Entry, Layout
from prefed.rules.by_layer import MOST, ByLayer, place_of, scale, shape
from prefed.rules.covariance_matrix import matrices
from prefed.rules.remembered import remembered
from prefed.rules.rule import RULES, Field, Fraction, State


@RULES.register("common")
@dataclass(frozen=True)
class Common(ByLayer):
    """m and P, embeddings and vectors as in ByLayer. For a weight matrix, once a round, from the m
    and P that the server has sent, and with r the root mean square of that sqrt(P),

        O = orthogonal(m)                               by Newton-Schulz iterations, as in Muon
        u = O / (sqrt(P) + tau_relative*r)              scaled to the norm of O

    and in each step, with m and P as they are after the gradient,

        own = (g - m) / (sqrt(P) + tau_relative*r) / sqrt(max(rows, columns))
        w = w - lr * sqrt(max(1, rows/columns)) * (u + own_lr * own)

    Entries of u and own are of one size: 1/sqrt(max(rows, columns)) in the root mean square, if
    all singular values are one and P is the variance that it estimates. While the server has no P,
    in the first round, u and own are zero.

    How long a gradient is expected to be is also as the server's m and P say.

    own_lr         the step size of `own`, as a share of that of u
    """

    of_clients: ClassVar[bool] = True
    begins_alike: ClassVar[bool] = True

    beta1: Fraction = 0.9
    own_lr: NonNegativeFloat = 1.0

    def fields(self, layout: Layout) -> dict[str, Field]:
        scales = Field((1 + len(self.fit(layout).places[0]),), cache=True)
        u = Field((layout.size,), cache=True)
        return super().fields(layout) | {"u": u, "scales": scales}

    def begin(self, w: Tensor, state: State) -> None:
        """Clients that begin with the same m and P have in common what follows from them: it is
        computed once and remembered, once a round and thread."""
        if w.dim() == 1:
            state = {name: value.unsqueeze(0) for name, value in state.items()}
        m = state["m"]
        if m.device.type != "cpu":  # to look at them would keep everybody waiting
            found = self.seen_from(state)
        elif len(m) == 1:
            found = self._remembered(state)
        else:
            each = [
                {n: value[row : row + 1] for n, value in state.items()} for row in range(len(m))
            ]
            found = tuple(map(torch.cat, zip(*map(self.seen_from, each), strict=True)))
        state["u"].copy_(found[0])
        state["scales"].copy_(found[1])

    def _remembered(self, state: State) -> tuple[Tensor, ...]:
        """`seen_from` for a block of one."""
        if state["m"].numel() > MOST:
            return self.seen_from(state)
        given = [state[name] for name in ("m", "P", "m_mass", "P_mass")]
        return remembered(self, given, lambda: self.seen_from(state))

    def seen_from(self, state: State) -> tuple[Tensor, ...]:
        """u (C, d), zero for all that is no matrix; and the length to expect of a gradient, with r
        of each matrix behind it. All are zero while there is no P."""
        m, mass = state["m"], state["P_mass"]
        u, root, is_there = torch.zeros_like(m), (state["P"] / mass).sqrt_(), mass > 0
        scales = [super().expected(state)]
        for entry in self.places[0]:
            its_root, target = matrices(root, entry), entry.view(u)
            target.copy_(self.turned(matrices(m, entry), its_root).reshape(target.shape))
            scales.append(its_root.square().mean((-2, -1)).sqrt_().unsqueeze(-1))
        return u.where(is_there, 0.0), torch.cat(scales, -1).where(is_there, 0.0)

    def expected(self, state: State) -> Tensor:
        return state["scales"][:, :1]

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if w.dim() == 1:  # one holder is a block of one
            state = {name: value.unsqueeze(0) for name, value in state.items()}
            w, g = w.unsqueeze(0), g.unsqueeze(0)
        seen = self.see(g, state)
        for entry, r in zip(self.places[0], state["scales"][:, 1:].unbind(-1), strict=True):
            r = r.view(-1, *[1] * len(entry.shape))
            tau = torch.where(r > 0, self.tau_relative * r, math.inf)
            own = entry.view(seen.off) / (entry.view(seen.root) + tau)
            along = entry.view(state["u"]).add(own, alpha=self.own_share(entry))
            entry.view(w).sub_(along, alpha=lr * scale(entry))
        self.move_rest(w, seen, lr)

    def own_share(self, entry: Entry) -> float:
        return self.own_lr / math.sqrt(max(shape(entry)))

    def in_c(self) -> str | None:
        whole, embeddings, vectors = self.places
        assert self.layout is not None
        lines = self.begin_in_c("scales[0]")
        lines += ["real its_lr, own_lr, tau;"] if whole else []
        for n, entry in enumerate(whole, 1):
            lines += [
                f"its_lr = {scale(entry)!r} * lr, own_lr = {self.own_share(entry)!r};",
                f"tau = scales[{n}] > 0 ? {self.tau_relative!r} * scales[{n}] : INFINITY;",
            ]
            own = "own_lr * off / (SQRT(share * P[i]) + tau)"
            lines += self.see_in_c(place_of(entry), f"w[i] -= its_lr * (u[i] + {own});")
        for place in (*embeddings, *vectors):
            lines += self.see_in_c(place)
        return "\n    ".join(["", *lines, *self.rest_in_c(embeddings, vectors)])
