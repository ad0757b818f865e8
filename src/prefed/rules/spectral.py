"""PreFed's m and P, with a step whose singular values are near one for weight matrices."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import PositiveInt
from torch import Tensor

from prefed.core.layout import Entry, Layout
from prefed.rules.by_layer import MOST, ByLayer, by_rows, scale, shape
from prefed.rules.covariance_matrix import matrices
from prefed.rules.rule import RULES, Field, State

LARGEST = 512
"""Rows or columns, the fewer of them, of matrices that are taken in C: torch is better at more."""


@RULES.register("spectral")
@dataclass(frozen=True)
class Spectral(ByLayer):
    """m and P, embeddings and vectors as in ByLayer. For a weight matrix, with r the root mean
    square of sqrt(P) over it,

        O = orthogonal((1 - beta1)*g + beta1*m)         by Newton-Schulz iterations, as in Muon
        u = O / (sqrt(P) + tau_relative*r)              scaled to the norm of O
        w = w - lr * sqrt(max(1, rows/columns)) * u

    Large values of tau_relative make it Muon.

    refresh        steps of a matrix along one u, of the first of them
    """

    refresh: PositiveInt = 1

    def fields(self, layout: Layout) -> dict[str, Field]:
        found, u = super().fields(layout), Field((layout.size,))
        return found | ({"u": u, "steps_left": Field((1,))} if self.refresh > 1 else {})

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if w.dim() == 1:  # one holder is a block of one
            state = {name: value.unsqueeze(0) for name, value in state.items()}
            w, g = w.unsqueeze(0), g.unsqueeze(0)
        seen = self.see(g, state)
        ahead = seen.g.lerp(state["m"], self.beta1)
        goes_on = self.goes_on(state)
        for entry in self.places[0]:
            target, step = entry.view(w), lr * scale(entry)
            if goes_on:
                target.sub_(entry.view(state["u"]), alpha=step)
                continue
            u = self.turned(matrices(ahead, entry), matrices(seen.root, entry))
            u = u.reshape(target.shape)
            if self.refresh > 1:
                entry.view(state["u"]).copy_(u)
            target.sub_(u, alpha=step)
        self.move_rest(w, seen, lr)

    def goes_on(self, state: State) -> bool:
        """Along the last u; `steps_left` counts the steps until the next."""
        if self.refresh == 1:
            return False
        if not (goes_on := bool((left := state["steps_left"]).any())):
            left.fill_(self.refresh)
        left.sub_(1)
        return goes_on

    def in_c(self) -> str | None:
        whole, embeddings, vectors = self.places
        assert self.layout is not None
        large = self.layout.size > MOST or any(min(shape(entry)) > LARGEST for entry in whole)
        if large or not all(map(by_rows, whole)):
            return None
        lines = self.see_in_c("ahead", "lerp(its, m[i], beta1)")
        rest = self.rest_in_c(embeddings, vectors)
        return "\n    ".join(["", *lines, *self._matrices(whole), *rest])

    def _matrices(self, whole: list[Entry]) -> Iterator[str]:
        """In C."""
        if not whole:
            return
        sizes = {shape(entry) for entry in whole}
        largest = " ".join(f"char m{r}_{c}[ORTHOGONAL({r}, {c})];" for r, c in sizes)
        yield f"static _Thread_local real memory[sizeof(union {{{largest}}})];"
        if self.refresh == 1:
            yield "static _Thread_local real u[SIZE];"
            yield "const int goes_on = 0;"
        else:
            yield "const int goes_on = steps_left[0] != 0;"
            yield f"steps_left[0] = (goes_on ? steps_left[0] : {self.refresh}) - 1;"
        tau = self.tau_relative
        for entry in whole:
            rows, columns = shape(entry)
            at, size = entry.offset, rows * columns
            own = f"ahead + {at}, u + {at}"
            yield "if (!goes_on) {"
            yield f"    orthogonal({rows}, {columns}, {self.iterations}, {own}, memory);"
            yield f"    divided({size}, {tau!r}, share, P + {at}, u + {at});"
            yield "}"
            yield f"r = {scale(entry)!r} * lr;"
            yield f"for (int64_t i = {at}; i < {at + size}; i++) w[i] -= r * u[i];"
