"""A round is two functions, and nothing else in the project knows what a round is.

    local_update    broadcast -> K steps on a block of clients -> update
    server_update   mean of the updates -> new global state

Engines decide where and for how many clients at a time local_update runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.errors import PrefedError
from prefed.layout import Layout
from prefed.rules import Field
from prefed.rules.base import State
from prefed.schedule import at
from prefed.sharing import Policy, reset

Kept = Mapping[int, State]
"""The state that clients keep, for those that have taken part."""


@dataclass
class Server:
    """The global state: all there is to know between two rounds, but for what clients keep."""

    round: int
    weights: Tensor
    buffers: Tensor
    optimiser: State
    """The state of the server rule."""
    shared: State
    """The server's copy of each averaged field of the client rule."""

    @classmethod
    def start(
        cls, algorithm: Algorithm, layout: Layout, weights: Tensor, buffers: Tensor
    ) -> Server:
        optimiser = algorithm.server_rule().fields(layout)
        client = algorithm.client_rule().fields(layout)
        shared = {n: f for n, f in client.items() if policy(algorithm, n).kind == "average"}
        return cls(
            round=0,
            weights=weights.clone(),
            buffers=buffers.clone(),
            optimiser={name: field.new(weights) for name, field in optimiser.items()},
            shared={name: field.new(weights) for name, field in shared.items()},
        )

    def averaged(self) -> State:
        """What the clients' values are averaged into, by name."""
        return {"weights": self.weights, "buffers": self.buffers} | self.shared


@dataclass(frozen=True)
class Update:
    """What comes back from a block of C clients."""

    values: State
    """Goes to the server: the change of the weights (C, d), the buffers, averaged fields."""
    kept: State
    """Stays with the clients."""
    losses: Tensor
    """Of each client (C): the mean over its steps."""


class Block(Protocol):
    """Some clients of the cohort, as an engine holds them while they train."""

    clients: Sequence[int]
    layout: Layout
    weights: Tensor
    """(C, d)"""
    gradient: Tensor
    """(C, d)"""

    def differentiate(self, k: int) -> Tensor:
        """Fill `gradient` from the batches of step k; the losses (C)."""

    def state(self, name: str, field: Field) -> Tensor:
        """Room for a field (C, ...), with any content."""

    def read_buffers(self) -> Tensor: ...

    def write_buffers(self, buffers: Tensor) -> None: ...

    def cohort_mean(self, rows: Tensor) -> Tensor:
        """The weighted mean of (C, d) over the whole cohort, for rules in lockstep."""


def policy(algorithm: Algorithm, field: str) -> Policy:
    return algorithm.sharing().get(field, reset())


def local_update(
    algorithm: Algorithm, server: Server, block: Block, kept: Kept, steps: int
) -> Update:
    """K local steps from the server's state, on each client of the block."""
    w, g = block.weights, block.gradient
    lr = at(algorithm.client_lr, server.round)
    rule = algorithm.client_rule().fast(w)
    fields = rule.fields(block.layout)

    w.copy_(server.weights)
    block.write_buffers(server.buffers)
    state = {name: block.state(name, field) for name, field in fields.items()}
    for name, field in fields.items():
        match policy(algorithm, name).kind:
            case "reset":
                state[name].fill_(field.start)
            case "average":
                state[name].copy_(server.shared[name])
            case "keep":
                for row, client in zip(state[name], block.clients, strict=True):
                    if client in kept:
                        row.copy_(kept[client][name])
                    else:
                        row.fill_(field.start)

    losses = w.new_zeros(len(block.clients))
    rule.begin(w, state)
    for k in range(steps):
        losses += block.differentiate(k)
        if algorithm.clip_norm is not None:
            norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
            g.mul_((algorithm.clip_norm / norm).clamp_(max=1))
        if algorithm.weight_decay:
            g.add_(w, alpha=algorithm.weight_decay)
        if rule.lockstep:
            state["mean"] = block.cohort_mean(g)
        rule.advance(w, g, state, lr, k)
    rule.finish(w, state, lr, steps)

    w.sub_(server.weights)
    averaged = {n: state[n] for n in fields if policy(algorithm, n).kind == "average"}
    return Update(
        values={"weights": w, "buffers": block.read_buffers()} | averaged,
        kept={n: state[n] for n in fields if policy(algorithm, n).kind == "keep"},
        losses=losses / steps,
    )


def server_update(
    algorithm: Algorithm, server: Server, mean: State, steps: int, participation: float
) -> None:
    """One step of the server rule with the clients' mean change, in place. Uses `mean` up.

    participation is the share of all clients that the mean speaks for.
    """
    g = algorithm.pseudo_gradient(mean["weights"], steps)
    lr = at(algorithm.server_lr, server.round)
    algorithm.server_rule().advance(server.weights, g, server.optimiser, lr, 0)
    server.buffers.copy_(mean["buffers"])
    for name, held in server.shared.items():
        if policy(algorithm, name).follow == "mean":
            held.copy_(mean[name])
        else:
            held.lerp_(mean[name], participation)
    server.round += 1


def first_kept(algorithm: Algorithm, layout: Layout, weights: Tensor) -> State:
    """What a client keeps before it has taken part."""
    fields = algorithm.client_rule().fields(layout)
    return {n: f.new(weights) for n, f in fields.items() if policy(algorithm, n).kind == "keep"}


def check_sharing(algorithm: Algorithm, layout: Layout) -> None:
    """Build both rules and compare the sharing policy with the fields they have."""
    fields = algorithm.client_rule().fields(layout)
    algorithm.server_rule().fields(layout)
    for name in algorithm.sharing():
        if name not in fields and not name.endswith("_mass"):
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: the client rule has no state {name!r}; "
                f"it has {', '.join(fields) or 'none'}"
            )


def traffic(
    algorithm: Algorithm, server: Server, clients: int, steps: int, answers: int | None = None
) -> dict[str, int]:
    """Exact bytes of a round, over all its clients, split into weights and optimiser state.

    answers is how many of the clients sent something back: all of them unless told.
    """
    answers = clients if answers is None else answers
    weights = server.weights.nbytes + server.buffers.nbytes
    up = down = sum(value.nbytes for value in server.shared.values())
    if algorithm.client_rule().lockstep:  # a gradient up and the mean gradient down in each step
        down += steps * server.weights.nbytes
        up += steps * server.weights.nbytes
    return {
        "bytes_up": answers * (weights + up),
        "bytes_down": clients * (weights + down),
        "bytes_up_weights": answers * weights,
        "bytes_up_state": answers * up,
        "bytes_down_weights": clients * weights,
        "bytes_down_state": clients * down,
    }
