"""What rules share that step otherwise for weight matrices, embeddings and vectors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from prefed.core.layout import Entry, Layout
from prefed.core.patterns import Patterns
from prefed.rules.fitted import Fitted
from prefed.rules.muon import EMBEDDINGS, orthogonal
from prefed.rules.rule import Field, Fraction, State, accumulate, grow_mass

TINY = 1e-30
"""Where a gradient is zero all over."""
MOST = 1 << 23
"""Weights of a model whose vectors are taken in C, or kept to compare with: a thread holds up to
five of that length as long as it lives."""
TAU = 1e-3
"""In place of sqrt(P) + tau_relative*r where P is zero all over, as in the covariance rule."""


class Seen(NamedTuple):
    """What a rule has of a gradient, for a block of clients (C, d)."""

    g: Tensor
    """Scaled down if it exploded."""
    off: Tensor
    """g - m."""
    m: Tensor
    """Corrected for its start."""
    root: Tensor
    """sqrt(P), corrected too."""


@dataclass(frozen=True)
class ByLayer(Fitted):
    """m and P as in the covariance rule, both corrected for their start at zero:

        m = beta1*m + (1 - beta1)*g
        P = beta2*P + (1 - beta2)*(g - m)^2

    For an embedding, whose rows are vectors of their own that are not seen equally often,
    w = w - lr * embedding_lr * m / (sqrt(P) + tau_relative*r), with r the root mean square of
    sqrt(P) over that table; and for vectors w = w - lr * plain_lr * m / (sqrt(P) + tau_relative*r),
    r over all of them. (While P is zero everywhere there, m / 0.001.) What becomes of weight
    matrices, the rule says. Convolutions are matrices (out, in * kernel).

    Before all this, a gradient that explodes is scaled down: it is never longer than clip_relative
    times what m and P lead to expect, the root of the sum of m^2 + P over all weights.

    beta1          the decay of m, the moving average of the gradient
    beta2          the decay of P, the moving average of the squared distance from m
    tau_relative   added to sqrt(P), as a share of its root mean square
    iterations     of Newton and Schulz
    plain          patterns of names: more parameters that are trained as embeddings
    plain_lr       the step size of vectors, as a share of that of the matrices
    embedding_lr   the step size of embeddings, as a share of that of the matrices
    clip_relative  how many times as long as expected a gradient may be; None for any length
    """

    elementwise: ClassVar[bool] = False

    beta1: Fraction = 0.95
    beta2: Fraction = 0.999
    tau_relative: PositiveFloat = 0.3
    iterations: NonNegativeInt = 5
    plain: Patterns = ()
    plain_lr: PositiveFloat = 0.1
    embedding_lr: PositiveFloat = 0.3
    clip_relative: PositiveFloat | None = 10.0

    def fields(self, layout: Layout) -> dict[str, Field]:
        vector, mass = (layout.size,), Field((1,), nonnegative=True)
        P = Field(vector, nonnegative=True)
        return {"m": Field(vector), "P": P, "m_mass": mass, "P_mass": mass}

    @cached_property
    def places(self) -> tuple[list[Entry], list[slice], list[slice]]:
        """The matrices, the embeddings, and the vectors."""
        assert self.layout is not None
        found: tuple[list[Entry], list[slice], list[slice]] = [], [], []
        matrices, embeddings, vectors = found
        for entry in self.layout.entries:
            if len(entry.shape) < 2:
                vectors.append(place_of(entry))
            elif self.is_embedding(entry):
                embeddings.append(place_of(entry))
            elif math.prod(entry.shape):
                matrices.append(entry)
        return found

    def is_embedding(self, entry: Entry) -> bool:
        """By its layer; where that is none of torch's own, by its name."""
        names = self.plain if entry.kind == "matrix" else (*self.plain, *EMBEDDINGS)
        named = any(fnmatchcase(entry.name, pattern) for pattern in names)
        return entry.kind == "embedding" or named

    def patterns(self) -> dict[str, tuple[str, ...]]:
        return {"plain": self.plain}

    def see(self, g: Tensor, state: State) -> Seen:
        """Take a gradient (C, d) into m and P."""
        m, P = state["m"], state["P"]
        if self.clip_relative is not None:
            g = g * self.shortening(g, state)
        m.lerp_(g, 1 - self.beta1)
        off = g - m
        accumulate(P, off, self.beta2, "ema")
        root = (P / grow_mass(state["P_mass"], self.beta2)).sqrt_()
        return Seen(g, off, m / grow_mass(state["m_mass"], self.beta1), root)

    def move_rest(self, w: Tensor, seen: Seen, lr: float) -> None:
        """The steps of embeddings and vectors."""
        _, embeddings, vectors = self.places
        for place in embeddings:
            self.divided(w, seen.m, seen.root, [place], lr * self.embedding_lr)
        if vectors:
            self.divided(w, seen.m, seen.root, vectors, lr * self.plain_lr)

    def turned(self, along: Tensor, root: Tensor) -> Tensor:
        """Matrices (C, rows, columns) made orthogonal, divided by sqrt(P) + tau, and scaled
        to the norm that they had between the two."""
        turned = orthogonal(along, self.iterations)
        u: Tensor = turned / self.damped(root)[1]
        return u.mul_(_norm(turned) / (_norm(u) + TINY))

    def shortening(self, g: Tensor, state: State) -> Tensor:
        """What each gradient is multiplied by (C, 1): 1, unless it explodes. The first of all may
        have any length."""
        assert self.clip_relative is not None
        expected = self.expected(state)
        share = self.clip_relative * expected / torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        return torch.where(expected > 0, share.clamp_(max=1), 1.0)

    def expected(self, state: State) -> Tensor:
        """The length of a gradient, by m and P (C, 1)."""
        m, P = state["m"] / state["m_mass"], state["P"].sum(-1, keepdim=True) / state["P_mass"]
        return (P + m.square().sum(-1, keepdim=True)).sqrt_()

    def divided(self, w: Tensor, m: Tensor, root: Tensor, places: list[slice], lr: float) -> None:
        """w -= lr * m / (sqrt(P) + tau_relative*r) there, r over all of these places."""
        r, damped = self.damped(torch.cat([root[:, p] for p in places], 1).unsqueeze(1))
        divisor = torch.where(r > 0, r * damped, TAU).squeeze(1)
        sizes = [place.stop - place.start for place in places]
        for place, own in zip(places, divisor.split(sizes, 1), strict=True):
            w[:, place].sub_(m[:, place] / own, alpha=lr)

    def damped(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """r, and sqrt(P)/r + tau_relative, for each of (C, rows, columns)."""
        r = root.square().mean((-2, -1), keepdim=True).sqrt_()
        return r, root / torch.where(r > 0, r, 1.0) + self.tau_relative

    def begin_in_c(self, expected: str) -> list[str]:
        """Numbers that a step in C needs, and how much shorter the gradient is made if it is longer
        than `expected` tells."""
        lines = [
            f"const real beta1 = {self.beta1!r}, beta2 = {self.beta2!r};",
            f"const real new1 = {1 - self.beta1!r}, new2 = {1 - self.beta2!r};",
            "real shorter = 1, r;",
        ]
        if self.clip_relative is not None:
            lines += [
                f"const double expected = {expected};",
                f"const double limit = {self.clip_relative!r} * expected / sqrt(squares(g, SIZE));",
                "if (expected > 0) shorter = limit > 1 ? 1 : limit;",
            ]
        return [
            *lines,
            "m_mass[0] += new1 * (1 - m_mass[0]);",
            "P_mass[0] += new2 * (1 - P_mass[0]);",
            "const real step = lr / m_mass[0], share = 1 / P_mass[0];",
        ]

    def see_in_c(self, place: slice, *then: str) -> list[str]:
        """m and P in C, and other lines for each of these numbers: `its` is the gradient there,
        `off` its distance from m."""
        return [
            f"for (int64_t i = {place.start}; i < {place.stop}; i++) {{",
            "    const real its = shorter * g[i];",
            "    const real off = beta1 * (its - m[i]); /* its - m, once m has moved */",
            "    m[i] = lerp(m[i], its, new1);",
            "    P[i] = beta2 * P[i] + new2 * (off * off);",
            *(f"    {line}" for line in then),
            "}",
        ]

    def rest_in_c(self, embeddings: list[slice], vectors: list[slice]) -> Iterator[str]:
        """In C."""
        groups = [([place], self.embedding_lr) for place in embeddings]
        for places, factor in [*groups, (vectors, self.plain_lr)]:
            sizes = [place.stop - place.start for place in places]
            if not sum(sizes):
                continue
            pairs = [*zip(places, sizes, strict=True)]
            sums = " + ".join(f"(double)total(P + {p.start}, {size})" for p, size in pairs)
            yield f"r = SQRT(share * (({sums}) / {sum(sizes)}));"
            for p, size in pairs:
                here = f"m + {p.start}, share, P + {p.start}, {self.tau_relative!r}, r"
                yield f"along({size}, {factor!r} * step, {here}, w + {p.start});"


def shape(entry: Entry) -> tuple[int, int]:
    """Of a weight as a matrix: rows, columns."""
    return entry.shape[0], math.prod(entry.shape[1:])


def by_rows(entry: Entry) -> bool:
    """Its rows lie one behind another, whatever the order inside them."""
    rows, columns = shape(entry)
    return rows == 1 or entry.stride[0] == columns


def place_of(entry: Entry) -> slice:
    return slice(entry.offset, entry.offset + math.prod(entry.shape))


def scale(entry: Entry) -> float:
    rows, columns = shape(entry)
    return math.sqrt(max(1.0, rows / columns))


def _norm(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.matrix_norm(matrix, keepdim=True)
    return found
