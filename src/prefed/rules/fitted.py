from dataclasses import dataclass, field, replace
from typing import Self

from prefed.core.layout import Layout
from prefed.rules.rule import Rule


@dataclass(frozen=True)
class Fitted(Rule):
    """A rule that looks at matrices, and so has to know where each tensor lies."""

    layout: Layout | None = field(default=None, init=False, repr=False)
    """Known after `fit`."""

    def fit(self, layout: Layout) -> Self:
        fitted = replace(self)
        object.__setattr__(fitted, "layout", layout)
        return fitted
