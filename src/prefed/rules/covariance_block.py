"""The covariance rule with one matrix for each tensor of the model, or for each row of each."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.layout import Entry
from prefed.rules.covariance import SHAPES
from prefed.rules.covariance_matrix import MatrixCovariance, inverse_roots, matrices
from prefed.rules.rule import mean_of_last

Blocks = Literal["row", "tensor"]

LARGEST = 4096
"""Weights in a block: a larger one takes minutes to factorise."""


@dataclass(frozen=True)
class Group:
    """The blocks of one tensor: all of one size."""

    entry: Entry
    count: int
    size: int
    start: int
    """Where they begin in P, which is all blocks one after another."""

    @property
    def numbers(self) -> int:
        return self.count * self.size**2

    def inside(self, P: Tensor) -> Tensor:
        """(C, count, size, size)"""
        part = P[:, self.start : self.start + self.numbers]
        blocks: Tensor = part.unflatten(1, (self.count, self.size, self.size))
        return blocks


@SHAPES.register("block")
@dataclass(frozen=True)
class BlockCovariance(MatrixCovariance):
    """P is block-diagonal: what different blocks have to do with each other is left out.

    blocks="row": a block for each output of a layer, that is each row of a weight matrix (of a
    convolution, with its kernels side by side); a bias is diagonal.
    blocks="tensor": a block for each tensor. With one tensor this is the full matrix.
    """

    blocks: Blocks = "row"

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        assert self.layout is not None
        found, start = [], 0
        for entry in self.layout.entries:
            n = prod(entry.shape)
            rows = entry.shape[0] if self.blocks == "row" and entry.shape else 1
            if n // max(rows, 1) > LARGEST:
                raise PrefedError(
                    f'shape: "block" would factorise a matrix of {n // rows} x {n // rows} for '
                    f"{entry.name}; the largest is {LARGEST}. "
                    + ('Use blocks="row" or s' if self.blocks == "tensor" else "Use s")
                    + 'hape="kronecker"'
                )
            if n:
                group = Group(entry, rows, n // rows, start)
                start += group.numbers
                found.append(group)
        return tuple(found)

    def kept_shape(self) -> tuple[int, ...]:
        return (sum(group.numbers for group in self.groups),)

    root_shape = kept_shape

    def add_outer(self, P: Tensor, r: Tensor, keep: float, take: float) -> None:
        P.mul_(keep)
        for group in self.groups:
            x = self.cut(r, group)
            group.inside(P).addcmul_(x.unsqueeze(-1), x.unsqueeze(-2), value=take)

    def mean_variance(self, P: Tensor) -> Tensor:
        diagonals = (group.inside(P).diagonal(dim1=-2, dim2=-1) for group in self.groups)
        return mean_of_last(torch.cat([part.flatten(1) for part in diagonals], dim=1))

    def derive(self, P: Tensor) -> Tensor:
        tau = self.tau_for(P)
        roots = [inverse_roots(group.inside(P), tau).flatten(1) for group in self.groups]
        return torch.cat(roots, dim=1)

    def move(self, w: Tensor, root: Tensor, u: Tensor, lr: float) -> None:
        for group in self.groups:
            target = group.entry.view(w)
            step = group.inside(root) @ self.cut(u, group).unsqueeze(-1)
            target.sub_(step.reshape(target.shape), alpha=lr)

    def cut(self, rows: Tensor, group: Group) -> Tensor:
        """(C, count, size)"""
        return matrices(rows, group.entry).reshape(len(rows), group.count, group.size)

    def diagonal(self, P: Tensor) -> Tensor:
        parts = (group.inside(P[None]).diagonal(dim1=-2, dim2=-1) for group in self.groups)
        return torch.cat([part.reshape(-1) for part in parts])
