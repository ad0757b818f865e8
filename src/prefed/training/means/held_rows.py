"""What a robust mean needs of a round: a row for each client, or for each bucket of them."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from prefed.core.memory import Memory, all_finite
from prefed.rules import State
from prefed.training.mean import Mean, Part, Rows, place
from prefed.training.means.mean_rule import MeanRule


class Buckets(Mean):
    """Clients in buckets of `size`, of which each becomes one row: the weighted mean of its
    clients, added up as they arrive. In buckets of one, a row is what a client sent.

    A bucket is a subtree of the tree over positions: clients get new positions, one bucket after
    another in the order that was drawn, and trees of more than one bucket are not built.
    """

    def __init__(self, size: int, order: Sequence[int], memory: Memory | None = None) -> None:
        """order   for each position in the cohort, its position among the shuffled"""
        super().__init__(memory)
        self.size, self.top = size, (size - 1).bit_length()
        self._places = [(n // size << self.top) + n % size for n in order]

    def add(self, position: int, values: State, weight: float, loss: float) -> None:
        part = Part(0, self._places[position], values, weight, loss * weight)
        if weight != 1 and self.size > 1:
            self._copy(part, weight)
        self._insert(part, ours=part.copied)
        self.clients += 1

    def rows(self) -> list[Part]:
        """One for each bucket that a client of has come, in the order of the buckets."""
        parts = sorted(self._parts.values(), key=place, reverse=True)
        found: list[Part] = []
        for _, (total, *rest) in groupby(parts, lambda part: place(part) >> self.top):
            for part in rest:
                part.merge(total)
                total = part
            if self.size > 1:
                for value in total.values.values():
                    value.div_(total.weight)
            found.insert(0, total)
        return found

    def give_back(self, rows: list[Part]) -> None:
        """The memory of the rows is not needed any more."""
        for row in rows:
            if row.copied:
                self._memory.give(row.values.values())


class RobustMean(Mean):
    """Collects the clients of a round as `Mean` does. Values that have a rule are held as rows
    until all have come; the others, statistics about the clients, are added up as ever."""

    def __init__(
        self,
        rules: Mapping[str, tuple[MeanRule, int]],
        order: Sequence[int],
        memory: Memory | None = None,
    ) -> None:
        """rules   for each value that has one, its rule and the size of the buckets before it
        order   as `Buckets` takes it
        """
        super().__init__(memory)
        self._rules = {name: rule for name, (rule, _) in rules.items()}
        sizes = {size for _, size in rules.values()}
        whole = range(len(order))
        self._held = {n: Buckets(n, order if n > 1 else whole, memory) for n in sorted(sizes)}
        self._names = {n: [v for v, (_, size) in rules.items() if size == n] for n in self._held}

    def add(self, position: int, values: State, weight: float, loss: float) -> None:
        for tree, own in self.collected(values):
            if tree is self:
                super().add(position, own, weight, loss)
            else:
                tree.add(position, own, weight, 0.0)

    def summed(self, rows: Rows) -> Rows:
        return rows

    def collected(self, like: State) -> list[tuple[Mean, State]]:
        """Values are in the tree of their bucket size, and those without a rule in this one."""
        held = [
            (tree, {name: like[name] for name in self._names[size] if name in like})
            for size, tree in self._held.items()
        ]
        rest = {name: value for name, value in like.items() if name not in self._rules}
        return [(self, rest), *held]

    def result(self) -> tuple[State, float]:
        values, loss = super().result()
        for tree in self._held.values():
            rows = tree.rows()
            weights = [row.weight for row in rows]
            for name in rows[0].values:
                each = [row.values[name] for row in rows]
                values[name] = self._of(self._rules[name], each, weights)
            tree.give_back(rows)
        return values, loss

    def _of(self, rule: MeanRule, rows: list[Tensor], weights: list[float]) -> Tensor:
        """The mean of one value; not finite if one of the rows is not: what is to be done then is
        not for a mean to say."""
        if not all(map(all_finite, rows)):
            return torch.full_like(rows[0], torch.nan)
        return rule.mean([row.reshape(-1) for row in rows], weights).view(rows[0].shape)


def shuffled(generator: np.random.Generator, clients: int) -> list[int]:
    found: list[int] = generator.permutation(clients).tolist()
    return found
