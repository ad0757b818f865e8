"""A block of clients while they train: the loop over local steps, and one step."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout
from prefed.core.parts import timed
from prefed.rules import Field, Rule, State
from prefed.rules.grouped import by_coordinate
from prefed.rules.rule import OTHER, Other


class Point(Protocol):
    """Weights of some clients and the gradients there: all that a local step needs."""

    weights: Tensor
    """(C, d)"""
    gradient: Tensor
    """(C, d)"""
    layout: Layout

    def cohort_mean(self, rows: Tensor) -> Tensor:
        """The weighted mean of (C, d) over the whole cohort, for rules in lockstep."""


class Block(ABC):
    """Some clients of the cohort (C of them), as an engine holds them while they train."""

    clients: Sequence[int]
    steps: Sequence[int]
    """The local steps of each, never more than those of the client before it."""
    layout: Layout
    weights: Tensor
    gradient: Tensor
    seed: int = 0
    """Of the run."""

    @abstractmethod
    def differentiate(self, k: int) -> Tensor:
        """Fill `gradient` from the batches of step k; the losses (C). Of clients that take no such
        step, neither is read."""

    @abstractmethod
    def state(self, name: str, field: Field) -> Tensor:
        """An uninitialised tensor (C, ...) for a field of the rule's state."""

    @abstractmethod
    def read_buffers(self) -> Tensor:
        """The statistics (C, s)."""

    @abstractmethod
    def write_buffers(self, buffers: Tensor, steps: Tensor) -> None:
        """Set the statistics (C, s), and the counters to what they are after `steps` (C)."""

    @abstractmethod
    def cohort_mean(self, rows: Tensor) -> Tensor: ...

    def other_gradient(self, kind: Other, k: int) -> Tensor:
        """What `Rule.other` asks for in step k (C, d), with the statistics left as they are."""
        raise PrefedError(
            f"the algorithm needs another gradient (the {kind} one) besides those of the steps, "
            f"which these clients do not compute; prefed.simulate and prefed deploy do"
        )

    def rule(self, algorithm: Algorithm) -> Rule:
        """The client rule, in the arithmetic that suits the engine."""
        return algorithm.client_rule().fit(self.layout).fused(self.weights)

    def begin_at(self, name: str, rows: Tensor, value: Tensor) -> None:
        """Let each of these rows (C, d), of the "weights" or of a field, begin with a value (d)."""
        rows.copy_(value)

    def change(self, start: Tensor) -> Tensor:
        """How far the weights that are the server's have moved from their start (d): (C, d), in
        the memory of the weights, which nobody needs afterwards."""
        return self.weights[:, : len(start)].sub_(start).contiguous()

    def alike(self) -> Iterator[tuple[slice, int]]:
        """The rows that take equally many steps, and how many."""
        first = 0
        for count, same in groupby(self.steps):
            last = first + sum(1 for _ in same)
            yield slice(first, last), count
            first = last

    def run_steps(self, algorithm: Algorithm, rule: Rule, state: State, lr: float) -> Tensor:
        """The local steps, in place. Returns the sum of each client's losses (C)."""
        losses = self.weights.new_zeros(len(self.clients))
        first = 0
        for clients in range(len(self.clients), 0, -1):  # those that are still at it
            if (last := self.steps[clients - 1]) == first:
                continue
            point: Point = self
            if clients < len(self.clients):
                state = {name: value[:clients] for name, value in state.items()}
                point = FirstRows(self, clients)
            for k in range(first, last):
                if (kind := rule.other(k)) is not None:
                    state[OTHER] = self.other_gradient(kind, k)[:clients]
                    if kind == "whole":
                        limit(algorithm, self.layout, point.weights, state[OTHER])
                found = self.differentiate(k)
                losses[:clients] += found[:clients]
                timed_step(algorithm, rule, point, state, lr, k)
                state.pop(OTHER, None)
            first = last
        return losses


class FirstRows:
    """The first clients of a block, where the others have taken all their steps."""

    def __init__(self, block: Block, clients: int) -> None:
        self.weights, self.gradient = block.weights[:clients], block.gradient[:clients]
        self.layout = block.layout

    def cohort_mean(self, rows: Tensor) -> Tensor:
        raise PrefedError("clients that meet in every step take equally many")


def local_step(
    algorithm: Algorithm, rule: Rule, point: Point, state: State, lr: float, k: int
) -> None:
    """Step k of the client rule, with the gradient at that point."""
    w, g = point.weights, point.gradient
    limit(algorithm, point.layout, w, g)
    if rule.lockstep:
        state["mean"] = point.cohort_mean(g)
    rule.apply(w, g, state, lr, k)


timed_step = timed("rule")(local_step)
"""The same where nothing is compiled: a compiler cannot see through who is told."""


def limit(algorithm: Algorithm, layout: Layout, w: Tensor, g: Tensor) -> None:
    """Clip a gradient, and add weight decay to it, in place."""
    groups, decay = algorithm.groups, algorithm.weight_decay
    if algorithm.clip_norm is not None:
        norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        g.mul_((algorithm.clip_norm / norm).clamp_(max=1))
    if groups and (decay or any(group.weight_decay for group in groups)):
        g.addcmul_(w, by_coordinate(groups, layout, "weight_decay", decay, w.dtype, w.device))
    elif decay:
        g.add_(w, alpha=decay)
