"""A round is two functions, and nothing else in the project knows what a round is.

    local_update    broadcast -> local steps on a block of clients -> update
    server_update   mean of the updates -> new global state

Engines decide where and for how many clients at a time local_update runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.parts import timed
from prefed.core.schedule import at, within
from prefed.rules import Rule, State
from prefed.rules.grouped import Grouped, unscaled
from prefed.rules.halved import Halved
from prefed.rules.wrapped import MEAN_CHANGE, Aligned, Decayed, Rising
from prefed.training.block import Block
from prefed.training.block_state import BlockState
from prefed.training.server_state import BUFFERS, LOCAL_STEPS, Kept, Server, policy

__all__ = ["Block", "Kept", "Server", "Update", "local_update", "server_update"]
"""With what the two functions are about: all that an engine needs."""


@dataclass(frozen=True)
class Update:
    """What comes back from a block of C clients."""

    values: State
    """Goes to the server: the change of the weights (C, d), the statistics if they are averaged,
    the averaged fields that are sent in this round."""
    kept: State
    """Stays with the clients."""
    losses: Tensor
    """Of each client (C): the mean over its steps."""
    steps: Sequence[int]
    """The local steps of each client."""

    def in_order(self, places: Sequence[int]) -> "Update":
        """Row i becomes row places[i]."""
        if [*places] == [*range(len(places))]:
            return self
        rows = torch.tensor(places, device=self.losses.device).argsort()
        values, kept = (
            {name: value.index_select(0, rows) for name, value in held.items()}
            for held in (self.values, self.kept)
        )
        steps = [self.steps[row] for row in rows.tolist()]
        return Update(values, kept, self.losses.index_select(0, rows), steps)


def local_update(algorithm: Algorithm, server: Server, block: Block, kept: Kept) -> Update:
    """The local steps from the server's state, on each client of the block."""
    w = block.weights
    lr = at(algorithm.client_lr, server.round)
    rule = client_rule(algorithm, server, block)
    own = BlockState(algorithm, server, block, rule)

    # 1. Begin where the server is, with the state that it sent and that clients have kept.
    block.begin_at("weights", w[:, : server.layout.size], server.weights)
    state = own.begin(kept)

    # 2. The local steps.
    own.tell(rule, state)
    losses = block.run_steps(algorithm, rule, state, lr)
    state = {name: value.to(w.dtype) for name, value in state.items()}
    for rows, steps in block.alike():
        rule.finish(w[rows], {name: value[rows] for name, value in state.items()}, lr, steps)

    # 3. What stays with the clients, and what goes to the server.
    stays = own.stays(state, lr)
    values = {"weights": block.change(server.weights)} | own.sent(state)
    return Update(values, kept=stays, losses=losses / own.steps_taken, steps=block.steps)


def client_rule(algorithm: Algorithm, server: Server, block: Block) -> Rule:
    """The client rule with what the algorithm's options do around its steps in this round."""

    def draw(row: int, k: int) -> Generator:
        return draws.generator(block.seed, "state", server.round, block.clients[row], k)

    def plain() -> Rule:
        return algorithm.client_rule().fit(block.layout)

    halved = algorithm.state_dtype != "weights"
    rule = Halved(plain(), draw) if halved else block.rule(algorithm)
    if algorithm.groups:
        decay = algorithm.decoupled_weight_decay
        rule = Grouped(rule, algorithm.groups, block.layout, plain(), decay)
    elif algorithm.decoupled_weight_decay:
        rule = Decayed(rule, algorithm.decoupled_weight_decay)
    rule = algorithm.in_turns(rule, server.layout.size)
    if algorithm.align:
        rule = Aligned(rule, server.layout.size, algorithm.own_share)
    factor = within(algorithm.client_lr, server.round)
    return rule if factor is None else Rising(rule, factor)


@timed("server step")
def server_update(
    algorithm: Algorithm, server: Server, mean: State, steps: float, participation: float
) -> None:
    """One step of the server rule with the clients' mean change, in place. Uses `mean` up.

    steps          the local steps behind it: where clients take unequally many, their mean
    participation  the share of all clients that the mean speaks for
    """
    mean.pop(LOCAL_STEPS, None)
    mean = algorithm.after_mean(mean)
    if BUFFERS in mean:
        server.buffers.copy_(mean[BUFFERS])
        server.steps += round(steps)
    for name, held in server.shared.items():
        if name not in mean:
            continue
        if (share := policy(algorithm, name).share(participation)) == 1:
            held.copy_(mean[name])
        else:
            held.lerp_(mean[name], share)
    _derive(algorithm, server, mean["weights"], steps)
    if algorithm.align:
        server.shared[MEAN_CHANGE].copy_(mean["weights"])
    g = algorithm.pseudo_gradient(mean["weights"], steps)
    lr = at(algorithm.server_lr, server.round)
    rule = algorithm.server_rule().fit(server.layout)
    rule.apply(server.weights, g, server.optimiser, lr, 0)
    server.round += 1
    if algorithm.mean_of_rounds is not None:
        server.take_mean_of_rounds(algorithm.mean_of_rounds)


def _derive(algorithm: Algorithm, server: Server, change: Tensor, steps: float) -> None:
    """The fields that follow from the clients' mean change of the weights and are not sent."""
    if not any(policy(algorithm, name).kind == "derived" for name in server.shared):
        return
    lr = at(algorithm.client_lr, server.round) * algorithm.own_share
    if algorithm.align:  # without what all clients moved by together
        change = change.sub(server.shared[MEAN_CHANGE], alpha=algorithm.align)
    change = unscaled(algorithm.groups, server.layout, change)
    found = algorithm.derive(change, server.shared, lr, steps)
    for name in server.shared.keys() & found.keys():
        server.shared[name].copy_(found[name])
