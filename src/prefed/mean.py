"""The weighted mean over a cohort, with the same bits whoever computes it.

Sums of floating-point numbers depend on the order of addition. Here the order is a fixed binary
tree over the positions in the cohort: (0+1)+(2+3), ... It depends neither on which client answers
first nor on how the cohort is divided among workers, its rounding error grows with the logarithm
of the cohort, and at most that many partial sums are held at a time if clients come in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class _Node:
    values: dict[str, Tensor]
    weight: float
    loss: float

    def merge(self, other: _Node) -> None:
        for name, value in self.values.items():
            value.add_(other.values[name])
        self.weight += other.weight
        self.loss += other.loss


class Mean:
    """Collects the clients of a round, each at its position in the cohort."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], _Node] = {}
        self.clients = 0

    def add(self, position: int, values: dict[str, Tensor], weight: float, loss: float) -> None:
        """Take one client's values; they are copied where they must be held."""
        if weight != 1:
            values = {name: value * weight for name, value in values.items()}
        node, level, index = _Node(values, weight, loss * weight), 0, position
        while (sibling := self._nodes.pop((level, index ^ 1), None)) is not None:
            sibling.merge(node)
            node, level, index = sibling, level + 1, index >> 1
        if node.values is values and weight == 1:
            node.values = {name: value.clone() for name, value in values.items()}
        self._nodes[level, index] = node
        self.clients += 1

    def result(self) -> tuple[dict[str, Tensor], float]:
        """The mean of the values, and of the losses."""
        total, *rest = (self._nodes[key] for key in sorted(self._nodes, key=_place, reverse=True))
        for node in rest:
            node.merge(total)
            total = node
        for value in total.values.values():
            value.div_(total.weight)
        return total.values, total.loss / total.weight


def _place(key: tuple[int, int]) -> int:
    level, index = key
    return index << level
