"""What clients begin a round with, what they send, and what stays with them.

The server has a copy of what is averaged or derived. A client has as its own, from one round in
which it takes part to the next:

    fields of its rule that it keeps, and averaged ones between two averages
    the personal part of the weights, and of fields that the server has for its own part
    the statistics of its buffers, if the algorithm keeps them
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from numpy.random import Generator
from torch import Tensor

from prefed.algorithms import Algorithm, Policy
from prefed.core import draws
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.rules import Field, Rule, State
from prefed.rules.grouped import unscaled
from prefed.rules.halved import give
from prefed.rules.wrapped import MEAN_CHANGE
from prefed.training.block import Block
from prefed.training.server_state import (
    BUFFERS,
    LAST,
    LOST,
    PERSONAL,
    STEPS,
    Kept,
    Server,
    codec_of,
    policies,
)


class BlockState:
    """What a block of clients has besides the shared weights, in one round.

    begin   before the first local step: what the server sent, and what clients have kept
    stays   after the last: what clients keep
    sent    after the last: what goes to the server
    """

    def __init__(self, algorithm: Algorithm, server: Server, block: Block, rule: Rule) -> None:
        self.algorithm, self.server, self.block = algorithm, server, block
        self.size = server.layout.size
        """Weights that the server has; those behind them are personal."""
        self.is_personal = server.personal.numel() > 0
        self.keeps_statistics = algorithm.statistics == "keep" and server.buffers.numel() > 0
        self.fields = rule.fields(block.layout)
        self.policies = policies(algorithm, self.fields)
        self.shared = shared_fields(self.policies, self.fields, block.layout)
        self.steps_taken = torch.tensor(block.steps, device=block.weights.device)

    def begin(self, kept: Kept) -> State:
        """Give clients their personal weights and statistics. Returns the state of the rule."""
        block, w, kept = self.block, self.block.weights, kept_by(kept, self.block.clients)
        if self.is_personal:
            w[:, self.size :].copy_(self.server.personal)
            self._go_on(w[:, self.size :], PERSONAL, kept)
        self.personal_before = w[:, self.size :].clone()
        self.behind = self._write_statistics(kept)
        state = {name: block.state(name, field) for name, field in self.fields.items()}
        for name, rows in state.items():
            match self.policies[name].kind:
                case "reset":
                    rows.fill_(self.fields[name].start)
                case "keep":
                    rows.fill_(self.fields[name].start)
                    self._go_on(rows, name, kept)
                case "average" | "derived":
                    self._receive(rows, name, kept)
        if self.algorithm.align:
            each = self.algorithm.align / self.steps_taken.to(w.dtype)
            mean_change = self.server.shared[MEAN_CHANGE]
            torch.mul(mean_change, each.unsqueeze(1), out=state[MEAN_CHANGE])
        return state

    @property
    def is_alike(self) -> bool:
        """All clients begin with what the server has, or with nothing."""
        of_its_own = any(p.kind == "keep" or p.kept_between for p in self.policies.values())
        return not (of_its_own or self.is_personal or self.algorithm.state_dtype != "weights")

    def tell(self, rule: Rule, state: State) -> None:
        """Tell the rule that a round begins: once, for clients that begin alike, if it may be."""
        w = self.block.weights
        if not (rule.begins_alike and self.is_alike):
            rule.begin(w, state)
            return
        rule.begin(w[:1], {name: value[:1] for name, value in state.items()})
        for name, field in self.fields.items():
            if field.cache:
                state[name][1:].copy_(state[name][:1].expand_as(state[name][1:]))

    def _receive(self, rows: Tensor, name: str, kept: Kept) -> None:
        """A field that the server has: its copy, or what a client has of its own and newer; and
        the client's own where the weights are personal."""
        copy, chosen, now = self._of_server(rows, name), self.policies[name], self.server
        if copy.dtype == now.shared[name].dtype:
            self.block.begin_at(name, copy, now.shared[name])
        else:
            give(copy, now.shared[name], partial(self._noise, name))
        if chosen.kept_between:
            newer = {c: v for c, v in kept.items() if chosen.is_newer(int(v[LAST]), now.round)}
            self._go_on(copy, name, newer)
        if self.is_personal and name in self.shared:
            rows[:, self.size :].fill_(self.fields[name].start)
            self._go_on(rows[:, self.size :], f"{PERSONAL}.{name}", kept)

    def _of_server(self, rows: Tensor, name: str) -> Tensor:
        """The part of a field that the server has a copy of."""
        return rows[:, : self.size] if name in self.shared else rows

    def _noise(self, name: str) -> list[Generator]:
        """The random numbers with which clients round a field that the server sends."""
        purpose, round = f"state {name}", self.server.round
        return [draws.generator(self.block.seed, purpose, round, c) for c in self.block.clients]

    def _go_on(self, rows: Tensor, name: str, kept: Kept) -> None:
        """Clients that have kept something go on with it."""
        for row, client in zip(rows, self.block.clients, strict=True):
            if client in kept:
                row.copy_(kept[client][name])

    def _write_statistics(self, kept: Kept) -> Tensor:
        """Give each client the statistics it begins with: its own, or the server's, which are the
        model's first unless they are averaged. Returns the steps behind them (C)."""
        held = {BUFFERS: self.server.buffers, STEPS: self.server.steps}
        rows = [held] * len(self.block.clients)
        if self.keeps_statistics:
            rows = [held | kept.get(client, {}) for client in self.block.clients]
        buffers, steps = (torch.stack([row[name] for row in rows]) for name in (BUFFERS, STEPS))
        self.block.write_buffers(buffers, steps)
        return steps

    def stays(self, state: State, lr: float) -> State:
        stays = {n: state[n] for n, chosen in self.policies.items() if chosen.kind == "keep"}
        between = [n for n, chosen in self.policies.items() if chosen.kept_between]
        if between:
            stays |= {name: self._of_server(state[name], name) for name in between}
            stays[LAST] = torch.full_like(self.steps_taken, self.server.round)
        if self.is_personal:
            own = self._personal(state, lr)
            stays[PERSONAL] = self.block.weights[:, self.size :]
            stays |= {f"{PERSONAL}.{name}": own[name] for name in self.shared}
        if self.keeps_statistics:
            steps = self.behind + self.steps_taken
            stays |= {BUFFERS: self.block.read_buffers(), STEPS: steps}
        return stays

    def _personal(self, state: State, lr: float) -> State:
        """The personal part of each field; where the server derives its own from the clients' mean
        change, derived from the change of the client's."""
        algorithm, block, size = self.algorithm, self.block, self.size
        own = {name: state[name][:, size:] for name in self.shared}
        if not any(self.policies[name].kind == "derived" for name in own):
            return own
        change = block.weights[:, size:] - self.personal_before
        change = unscaled(algorithm.groups, block.layout, change, size)
        found = []
        for rows, steps in block.alike():
            its = {name: value[rows] for name, value in own.items()}
            found.append(algorithm.derive(change[rows], its, lr, steps))
        return own | {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def sent(self, state: State) -> State:
        """All but the change of the weights: averaged fields that are due, and statistics."""
        due = [n for n, chosen in self.policies.items() if chosen.sent(self.server.round)]
        sent = {name: self._of_server(state[name], name).contiguous() for name in due}
        if self.algorithm.statistics == "average":
            sent[BUFFERS] = self.block.read_buffers()
        return sent


def shared_fields(
    chosen: Mapping[str, Policy], fields: Mapping[str, Field], layout: Layout
) -> list[str]:
    """The fields that the server has a copy of for its part of the weights."""
    vectors = [name for name, field in fields.items() if field.shape == (layout.size,)]
    return [name for name in vectors if chosen[name].comes_down]


def first_kept(algorithm: Algorithm, flat: FlatModel) -> State:
    """What a client keeps before it has taken part: the names and shapes of `BlockState.stays`, and
    what its codec has not sent."""
    weights, size = flat.weights, flat.shared.size
    fields = algorithm.client_rule().fields(flat.layout)
    of_fields = policies(algorithm, fields)
    shared = shared_fields(of_fields, fields, flat.layout)
    kept = {n: fields[n].new(weights) for n, chosen in of_fields.items() if chosen.kind == "keep"}
    if algorithm.statistics == "keep" and (buffers := flat.read_buffers()).numel():
        kept |= {BUFFERS: buffers, STEPS: weights.new_zeros((), dtype=torch.int64)}
    if codec_of(algorithm, "weights").feedback:
        kept[LOST] = weights.new_zeros(size)
    if between := [n for n, chosen in of_fields.items() if chosen.kept_between]:
        first = {name: fields[name].new(weights) for name in between}
        kept |= {n: v[:size].clone() if n in shared else v for n, v in first.items()}
        kept[LAST] = weights.new_zeros((), dtype=torch.int64)
    if (personal := weights[size:]).numel():
        kept[PERSONAL] = personal.clone()
        kept |= {f"{PERSONAL}.{n}": torch.full_like(personal, fields[n].start) for n in shared}
    return kept


def kept_by(kept: Kept, clients: Sequence[int]) -> Kept:
    """What these clients keep, read once from where it is held."""
    return {client: kept[client] for client in clients if client in kept}


def client_state(server: Server, kept: State) -> tuple[Tensor, Tensor]:
    """All weights and statistics of a client that keeps this, as it would be evaluated: the
    server's where it has none of its own. To be read only: nothing is copied that need not be."""
    own = kept.get(PERSONAL, server.personal)
    weights, buffers = server.model()
    weights = torch.cat([weights, own]) if own.numel() else weights
    return weights, kept.get(BUFFERS, buffers)
