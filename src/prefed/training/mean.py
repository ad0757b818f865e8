"""The weighted mean over a cohort, with the same bits whoever computes it.

Sums of floating-point numbers depend on the order of addition. Here the order is a fixed binary
tree over the positions in the cohort: (0+1)+(2+3), ... It depends neither on which client answers
first nor on how the cohort is divided among workers, its rounding error grows with the logarithm
of the cohort, and at most that many partial sums are held at a time if clients come in order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from prefed.core.memory import Memory
from prefed.core.parts import timed
from prefed.rules import State
from prefed.training.subtrees import levels, subtrees


@dataclass
class Part:
    """The sum over a subtree: where it stands, and what it adds up to."""

    level: int
    index: int
    values: dict[str, Tensor]
    weight: float
    loss: float
    copied: bool = False
    """The values are in memory of the mean's own."""

    def merge(self, other: "Part") -> None:
        for name, value in self.values.items():
            value.add_(other.values[name])
        self.weight += other.weight
        self.loss += other.loss
        self.level, self.index = self.level + 1, self.index >> 1


@dataclass(frozen=True)
class Rows:
    """The clients of a block, at neighbouring positions of the cohort."""

    first: int
    values: dict[str, Tensor]
    """(C, ...)"""
    weights: list[float]
    losses: list[float]

    def __iter__(self) -> Iterator[tuple[int, dict[str, Tensor], float, float]]:
        """Each with its position, as `Mean.add` takes it."""
        for row, (weight, loss) in enumerate(zip(self.weights, self.losses, strict=True)):
            yield self.first + row, {n: v[row] for n, v in self.values.items()}, weight, loss


@dataclass(frozen=True)
class Sums:
    """The subtrees of a block of so many clients, whose siblings lie outside of it."""

    clients: int
    borrowed: list[Part]
    """Clients as they came: in the memory of whoever trained them."""
    fresh: list[Part]


Added = Rows | Sums
"""A block that has been trained, as far as it is added up."""


class Mean:
    """Collects the clients of a round, each at its position in the cohort."""

    top: int = 64
    """Subtrees of this level stay apart."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._parts: dict[tuple[int, int], Part] = {}
        self._memory = memory or Memory()
        self.clients = 0

    def add(self, position: int, values: dict[str, Tensor], weight: float, loss: float) -> None:
        """Take one client's values; they are copied where they must be held."""
        part = Part(0, position, values, weight, loss * weight)
        if weight != 1:
            self._copy(part, weight)
        self._insert(part, ours=weight != 1)
        self.clients += 1

    def _copy(self, part: Part, weight: float = 1.0) -> None:
        part.values = {n: self._memory.copy(value, weight) for n, value in part.values.items()}
        part.copied = True

    def add_block(
        self, first: int, values: dict[str, Tensor], weights: list[float], losses: list[float]
    ) -> None:
        """Take clients at neighbouring positions: `add` for each, with the same bits."""
        self.take(self.summed(Rows(first, values, weights, losses)))

    @timed("mean")
    def summed(self, rows: Rows) -> Added:
        """What can be added up of these clients before their turn, level by level of the tree for
        all of them at once. It changes nothing here, so whoever trains them may call it."""
        weights, losses = rows.weights, rows.losses
        if len(weights) == 1:
            return rows
        are_ones = all(weight == 1 for weight in weights)
        factors = None if are_ones else weights
        values = {name: subtrees(rows.first, value, factors) for name, value in rows.values.items()}
        losses = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        found = Sums(len(weights), [], [])
        for level in levels(rows.first, len(weights)):
            for row in level.alone:
                own = {name: next(sums) for name, sums in values.items()}
                part = Part(level.number, level.first + row, own, weights[row], losses[row])
                given = are_ones and level.number == 0
                (found.borrowed if given else found.fresh).append(part)
            weights, losses = (
                [a + b for a, b in zip(column[level.left], column[level.right], strict=True)]
                for column in (weights, losses)
            )
        return found

    @timed("mean")
    def take(self, block: Added) -> None:
        """What `summed` has made of a block."""
        if isinstance(block, Rows):
            for row in block:
                self.add(*row)
            return
        self.clients += block.clients
        for part in block.borrowed:
            self._insert(part, ours=False)
        for part in block.fresh:
            self._insert(part, ours=True)

    def parts(self) -> list[Part]:
        """The subtrees so far, for another Mean to go on with."""
        return list(self._parts.values())

    def add_part(self, part: Part) -> None:
        self._insert(part, ours=True)

    def collected(self, like: State) -> "list[tuple[Mean, State]]":
        """The trees that it consists of, and which of the values `like` each has."""
        return [(self, like)]

    def _insert(self, part: Part, ours: bool) -> None:
        """Put a subtree in its place and merge it upwards; `ours` if it need not be copied."""
        given = part
        while (
            part.level < self.top
            and (sibling := self._parts.pop((part.level, part.index ^ 1), None)) is not None
        ):
            sibling.merge(part)
            if part.copied:
                self._memory.give(part.values.values())
            part = sibling
        if part is given and not ours:
            self._copy(part)
        self._parts[part.level, part.index] = part

    @timed("mean")
    def result(self) -> tuple[dict[str, Tensor], float]:
        """The mean of the values, and of the losses."""
        total, *rest = sorted(self._parts.values(), key=place, reverse=True)
        for part in rest:
            part.merge(total)
            if total.copied:
                self._memory.give(total.values.values())
            total = part
        for value in total.values.values():
            value.div_(total.weight)
        return total.values, total.loss / total.weight


def place(part: Part) -> int:
    """The position of its first client."""
    return part.index << part.level
