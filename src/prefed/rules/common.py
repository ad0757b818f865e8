"""One direction for all clients, with singular values near one, and each client's own distance from
its running mean beside it."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from prefed.core.layout import Entry, Layout
from prefed.rules.by_layer import MOST, ByLayer, scale, shape
from prefed.rules.covariance_matrix import matrices
from prefed.rules.rule import RULES, Field, Fraction, State


@RULES.register("common")
@dataclass(frozen=True)
class Common(ByLayer):
    """m and P, embeddings and vectors as in ByLayer. For a weight matrix, with r the root mean
    square of sqrt(P) over it, once a round from the m and P that the server has sent,

        O = orthogonal(m)                               by Newton-Schulz iterations, as in Muon
        u = O / (sqrt(P) + tau_relative*r)              scaled to the norm of O

    and in each step, with m and P as they are after the gradient,

        own = (g - m) / (sqrt(P) + tau_relative*r) / sqrt(max(rows, columns))
        w = w - lr * sqrt(max(1, rows/columns)) * (u + own_lr * own)

    Entries of u and own are of one size: 1/sqrt(max(rows, columns)) in the root mean square, if
    all singular values are one and P is the variance that it estimates. Before the first round
    there is no m, and u is zero.

    own_lr         the step size of `own`, as a share of that of u
    """

    beta1: Fraction = 0.9
    own_lr: NonNegativeFloat = 1.0

    def fields(self, layout: Layout) -> dict[str, Field]:
        return super().fields(layout) | {"u": Field((layout.size,), cache=True)}

    def begin(self, w: Tensor, state: State) -> None:
        """All clients begin with the same m and P, so u is computed once and remembered: once a
        round and thread."""
        if w.dim() == 1:
            state = {name: value.unsqueeze(0) for name, value in state.items()}
        m, P, u = state["m"], state["P"], state["u"]
        rows = slice(1) if bool((m == m[:1]).all() and (P[:1] == P).all()) else slice(None)
        for row in range(len(m[rows])):
            u[row].copy_(self._remembered(m[row], P[row], state["P_mass"][row]))
        if rows.stop == 1:
            u[1:].copy_(u[:1].expand(len(u) - 1, -1))

    def _remembered(self, m: Tensor, P: Tensor, mass: Tensor) -> Tensor:
        """u for this m and P (d)."""
        if len(m) > MOST:
            return self.direction(m, P, mass)
        known: Known | None = _local.__dict__.get("newest")
        if known is None or not known.is_of(self, m, P):
            u = self.direction(m, P, mass)
            known = _local.newest = Known(self, m.clone(), P.clone(), u)
        return known.u

    def direction(self, m: Tensor, P: Tensor, mass: Tensor) -> Tensor:
        """u of one holder; zero for all that is no matrix, and while there is no m."""
        u, root = torch.zeros_like(m), (P / mass).sqrt_()
        if mass > 0:
            for entry in self.places[0]:
                one = (matrices(x.unsqueeze(0), entry) for x in (m, root))
                entry.view(u).copy_(self.turned(*one).reshape(entry.shape))
        return u

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if w.dim() == 1:  # one holder is a block of one
            state = {name: value.unsqueeze(0) for name, value in state.items()}
            w, g = w.unsqueeze(0), g.unsqueeze(0)
        seen = self.see(g, state)
        for entry in self.places[0]:
            off, root = entry.view(seen.off), entry.view(seen.root)
            r = matrices(seen.root, entry).square().mean((-2, -1)).sqrt_()
            r = r.view(-1, *[1] * len(entry.shape))
            own = torch.where(r > 0, off / (root + self.tau_relative * r), 0.0)
            along = entry.view(state["u"]).add(own, alpha=self.own_share(entry))
            entry.view(w).sub_(along, alpha=lr * scale(entry))
        self.move_rest(w, seen, lr)

    def own_share(self, entry: Entry) -> float:
        return self.own_lr / math.sqrt(max(shape(entry)))

    def in_c(self) -> str | None:
        whole, embeddings, vectors = self.places
        assert self.layout is not None
        if self.layout.size > MOST:
            return None
        lines = self.see_in_c("apart", "off")
        rest = self.rest_in_c(embeddings, vectors)
        return "\n    ".join(["", *lines, *self._matrices(whole), *rest])

    def _matrices(self, whole: list[Entry]) -> Iterator[str]:
        """In C."""
        for entry in whole:
            at, size = entry.offset, math.prod(entry.shape)
            yield f"r = SQRT(share * (total(P + {at}, {size}) / {size}));"
            given = (
                f"{self.own_share(entry)!r}, apart + {at}, share, P + {at}, {self.tau_relative!r}"
            )
            yield f"both({size}, {scale(entry)!r} * lr, u + {at}, {given}, r, w + {at});"


class Known(NamedTuple):
    """A direction, and what it is of."""

    rule: Common
    m: Tensor
    P: Tensor
    u: Tensor

    def is_of(self, rule: Common, m: Tensor, P: Tensor) -> bool:
        same = self.rule == rule and self.m.dtype == m.dtype and self.m.shape == m.shape
        return same and torch.equal(self.m, m) and torch.equal(self.P, P)


_local = threading.local()
