"""PreFed's m and P, with a step whose singular values are near one for weight matrices."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import PositiveInt
from torch import Tensor

from prefed.core.layout import Entry, Layout
from prefed.rules.by_layer import MOST, ByLayer, by_rows, scale, shape
from prefed.rules.covariance_matrix import matrices
from prefed.rules.refreshed import STEPS_LEFT, Rows, due
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
        found = super().fields(layout)
        if self.refresh > 1:
            found |= {"u": Field((layout.size,), cache=True), "steps_left": STEPS_LEFT}
        return found

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if w.dim() == 1:  # one holder is a block of one
            state = {name: value.unsqueeze(0) for name, value in state.items()}
            w, g = w.unsqueeze(0), g.unsqueeze(0)
        seen = self.see(g, state)
        ahead = seen.g.lerp(state["m"], self.beta1)
        rows = slice(None) if self.refresh == 1 else due(state["steps_left"], self.refresh)
        for entry in self.places[0]:
            u = self.along(entry, ahead, seen.root, state, rows)
            entry.view(w).sub_(u, alpha=lr * scale(entry))
        self.move_rest(w, seen, lr)

    def along(
        self, entry: Entry, ahead: Tensor, root: Tensor, state: State, rows: Rows | None
    ) -> Tensor:
        """u of a weight matrix: that of the state, where it is not the turn of a client."""
        if rows is not None:
            u = self.turned(matrices(ahead, entry)[rows], matrices(root, entry)[rows])
            u = u.reshape(-1, *entry.shape)
            if self.refresh == 1:
                return u
            entry.view(state["u"])[rows] = u
        return entry.view(state["u"])

    def in_c(self) -> str | None:
        whole, embeddings, vectors = self.places
        assert self.layout is not None
        large = self.layout.size > MOST or any(min(shape(entry)) > LARGEST for entry in whole)
        if large or not all(map(by_rows, whole)):
            return None
        expected = "sqrt(total(P, SIZE) / P_mass[0] + squares(m, SIZE) / (m_mass[0] * m_mass[0]))"
        everything = slice(0, self.layout.size)
        lines = [
            *self.begin_in_c(expected),
            "static _Thread_local real ahead[SIZE];",
            *self.see_in_c(everything, "ahead[i] = lerp(its, m[i], beta1);"),
            *self._matrices(whole),
            *self.rest_in_c(embeddings, vectors),
        ]
        return "\n    ".join(["", *lines])

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
            yield "const int goes_on = steps_left[0] > 0;"
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
