"""A round is two functions, and nothing else in the project knows what a round is.

    local_update    broadcast -> local steps on a block of clients -> update
    server_update   mean of the updates -> new global state

Engines decide where and for how many clients at a time local_update runs.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from numpy.random import Generator
from torch import Tensor

from prefed.algorithms import Algorithm, Policy, reset
from prefed.codecs import Codec, codec
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.core.parts import timed
from prefed.core.schedule import at, within
from prefed.rules import Field, Rule, State
from prefed.rules.grouped import Grouped, unscaled
from prefed.rules.halved import Halved, give
from prefed.rules.rule import OTHER, Other
from prefed.rules.wrapped import MEAN_CHANGE, Aligned, Decayed, Rising

Kept = Mapping[int, State]
"""The state that clients keep, for those that have taken part."""

BUFFERS, STEPS = "buffers", "buffer_steps"
"""The statistics of a model's buffers among the values that are sent or kept; and, for its
counters, the local steps behind statistics that are kept."""

PERSONAL = "personal"
"""Kept by a client: its part of the weights; and, with a field's name behind it, of that field."""

LOCAL_STEPS = "local_steps"
"""Among the values that are averaged: how many local steps each client took, as float64."""

LAST = "last_round"
"""Kept by a client with state that it keeps between two averages: the round (from 0) it is from."""

LOST = "lost"
"""Kept by a client whose codec has error feedback: what it has not sent yet of its changes."""


@dataclass
class Server:
    """The global state: all there is to know between two rounds, but for what clients keep."""

    round: int
    weights: Tensor
    buffers: Tensor
    """The statistics among the buffers."""
    optimiser: State
    """The state of the server rule."""
    shared: State
    """The server's copy of each averaged or derived field of the client rule; and, for clients that
    are aligned, their mean change of the last round."""
    layout: Layout
    """Of the weights. Part of no message: both sides have it from their model."""
    steps: Tensor
    """The local steps behind the statistics: what the counters among the buffers go by."""
    personal: Tensor
    """The first values of the part of the weights that stays with clients. Part of no message."""
    over_rounds: State = dataclasses.field(default_factory=dict)
    """The mean of the weights and that of the statistics over rounds, and of how many, if the
    algorithm takes them."""
    limits: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Of the round under way: after how many local steps a client stops, if before its last."""

    @classmethod
    def start(
        cls,
        algorithm: Algorithm,
        layout: Layout,
        weights: Tensor,
        buffers: Tensor,
    ) -> "Server":
        """From the model's first weights, of which the server has those in its layout."""
        weights, personal = weights[: layout.size].clone(), weights[layout.size :].clone()
        optimiser = algorithm.server_rule().fields(layout)
        client = algorithm.client_rule().fields(layout)
        shared = {n: f for n, f in client.items() if policy(algorithm, n).comes_down}
        if algorithm.align:
            shared[MEAN_CHANGE] = Field((layout.size,))
        over_rounds = {}
        if algorithm.mean_of_rounds is not None:
            first = {"weights": weights, BUFFERS: buffers}
            wide = {n: v.to(torch.promote_types(v.dtype, torch.float32)) for n, v in first.items()}
            over_rounds = {name: value.clone() for name, value in wide.items()}
            over_rounds["rounds"] = weights.new_zeros((), dtype=torch.int64)
        return cls(
            round=0,
            weights=weights,
            buffers=buffers.clone(),
            optimiser={name: field.new(weights) for name, field in optimiser.items()},
            shared={name: field.new(weights) for name, field in shared.items()},
            layout=layout,
            steps=weights.new_zeros((), dtype=torch.int64),
            personal=personal,
            over_rounds=over_rounds,
        )

    def model(self) -> tuple[Tensor, Tensor]:
        """The weights and statistics that are evaluated and handed over: the mean over rounds if
        the algorithm takes one, else those that clients go on from. To be read only."""
        weights = self.over_rounds.get("weights", self.weights)
        buffers = self.over_rounds.get(BUFFERS, self.buffers)
        return weights.to(self.weights.dtype), buffers.to(self.buffers.dtype)

    def broadcast(self, algorithm: Algorithm) -> State:
        """What goes down to every client of a cohort."""
        return {"weights": self.weights} | self._statistics(algorithm) | self.shared

    def values(self, algorithm: Algorithm) -> State:
        """For each value that a client sends in this round, the server's own."""
        sent = {n: v for n, v in self.shared.items() if policy(algorithm, n).sent(self.round)}
        return {"weights": self.weights} | self._statistics(algorithm) | sent

    def _statistics(self, algorithm: Algorithm) -> State:
        return {BUFFERS: self.buffers} if algorithm.statistics == "average" else {}


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


class Point(Protocol):
    """Weights of some clients and the gradients there: all that a local step needs."""

    weights: Tensor
    """(C, d)"""
    gradient: Tensor
    """(C, d)"""

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
                        limit(algorithm, point.weights, state[OTHER])
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

    def cohort_mean(self, rows: Tensor) -> Tensor:
        raise PrefedError("clients that meet in every step take equally many")


def kept_by(kept: Kept, clients: Sequence[int]) -> Kept:
    """What these clients keep, read once from where it is held."""
    return {client: kept[client] for client in clients if client in kept}


def policy(algorithm: Algorithm, field: str) -> Policy:
    return algorithm.sharing().get(field, reset())


def local_update(algorithm: Algorithm, server: Server, block: Block, kept: Kept) -> Update:
    """The local steps from the server's state, on each client of the block."""
    w, size = block.weights, server.layout.size
    lr = at(algorithm.client_lr, server.round)
    rule = _with_options(algorithm, _rule(algorithm, block, server.round), block.layout, size)
    if (factor := within(algorithm.client_lr, server.round)) is not None:
        rule = Rising(rule, factor)
    steps_taken = torch.tensor(block.steps, device=w.device)
    fields = rule.fields(block.layout)
    shared = shared_fields(algorithm, fields, block.layout)

    w[:, :size].copy_(server.weights)
    for row, mine in _personal(server, w, block, kept, PERSONAL):
        row.copy_(server.personal if mine is None else mine)
    behind = _write_statistics(algorithm, server, block, kept)
    state = {name: block.state(name, field) for name, field in fields.items()}
    for name, field in fields.items():
        match policy(algorithm, name).kind:
            case "reset":
                state[name].fill_(field.start)
            case "average" | "derived" if name in shared:
                give(
                    state[name][:, :size], server.shared[name], partial(_noise, server, block, name)
                )
                for row, mine in _personal(server, state[name], block, kept, f"{PERSONAL}.{name}"):
                    row.fill_(field.start) if mine is None else row.copy_(mine)
            case "average" | "derived":
                give(state[name], server.shared[name], partial(_noise, server, block, name))
            case "keep":
                for row, client in zip(state[name], block.clients, strict=True):
                    if client in kept:
                        row.copy_(kept[client][name])
                    else:
                        row.fill_(field.start)

    held = _held(algorithm, fields, shared, size)
    for name, part in held.items():
        _go_on(algorithm, server, block, kept, name, state[name][:, part])

    if algorithm.align:
        each = algorithm.align / steps_taken.to(w.dtype)
        torch.mul(server.shared[MEAN_CHANGE], each.unsqueeze(1), out=state[MEAN_CHANGE])

    began = w[:, size:].clone()
    rule.begin(w, state)
    losses = block.run_steps(algorithm, rule, state, lr)
    state = {name: value.to(w.dtype) for name, value in state.items()}
    for rows, steps in _alike(block.steps):
        rule.finish(w[rows], {name: value[rows] for name, value in state.items()}, lr, steps)

    stays = {n: state[n] for n in fields if policy(algorithm, n).kind == "keep"}
    if held:
        stays |= {name: state[name][:, part] for name, part in held.items()}
        stays[LAST] = torch.full_like(steps_taken, server.round)
    if server.personal.numel():
        own = {n: state[n][:, size:] for n in shared}
        if any(policy(algorithm, n).kind == "derived" for n in own):
            change, found = w[:, size:] - began, []
            change = unscaled(algorithm.groups, block.layout, change, size)
            for rows, steps in _alike(block.steps):
                its = {name: value[rows] for name, value in own.items()}
                found.append(algorithm.derive(change[rows], its, lr, steps))
            own |= {name: torch.cat([part[name] for part in found]) for name in found[0]}
        stays |= {PERSONAL: w[:, size:]} | {f"{PERSONAL}.{n}": own[n] for n in shared}
    w[:, :size].sub_(server.weights)
    sent = {n: state[n] for n in fields if policy(algorithm, n).sent(server.round)}
    sent |= {n: state[n][:, :size].contiguous() for n in sent if n in shared}
    match algorithm.statistics:
        case "average":
            sent[BUFFERS] = block.read_buffers()
        case "keep" if server.buffers.numel():
            stays |= {BUFFERS: block.read_buffers(), STEPS: behind + steps_taken}
    change = w[:, :size].contiguous()
    values = {"weights": change} | sent
    return Update(values, kept=stays, losses=losses / steps_taken, steps=block.steps)


def _rule(algorithm: Algorithm, block: Block, round: int) -> Rule:
    """The client rule, with its state in the type that the algorithm asks for."""
    if algorithm.state_dtype == "weights":
        return block.rule(algorithm)

    def draw(row: int, k: int) -> Generator:
        return draws.generator(block.seed, "state", round, block.clients[row], k)

    return Halved(algorithm.client_rule().fit(block.layout), draw)


def _noise(server: Server, block: Block, name: str) -> list[Generator]:
    """The random numbers with which clients round a field that the server sends."""
    return [draws.generator(block.seed, f"state {name}", server.round, c) for c in block.clients]


def _with_options(algorithm: Algorithm, rule: Rule, layout: Layout, shared: int) -> Rule:
    """The client rule with what the algorithm's options do around its steps."""
    if algorithm.groups:
        plain = algorithm.client_rule().fit(layout)
        decays = algorithm.weight_decay, algorithm.decoupled_weight_decay
        rule = Grouped(rule, algorithm.groups, layout, plain, *decays)
    elif algorithm.decoupled_weight_decay:
        rule = Decayed(rule, algorithm.decoupled_weight_decay)
    rule = algorithm.in_turns(rule, shared)
    return Aligned(rule, shared, algorithm.own_share) if algorithm.align else rule


def _alike(steps: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """The rows that take equally many steps, and how many."""
    first = 0
    for count, same in groupby(steps):
        last = first + sum(1 for _ in same)
        yield slice(first, last), count
        first = last


def _personal(
    server: Server, rows: Tensor, block: Block, kept: Kept, name: str
) -> Iterable[tuple[Tensor, Tensor | None]]:
    """The personal part of each row, and what its client has kept of it."""
    if not server.personal.numel():
        return ()
    own = [kept.get(client, {}).get(name) for client in block.clients]
    return zip(rows[:, server.layout.size :], own, strict=True)


def shared_fields(algorithm: Algorithm, fields: Mapping[str, Field], layout: Layout) -> list[str]:
    """The fields that the server has a copy of for its part of the weights."""
    vectors = [name for name, field in fields.items() if field.shape == (layout.size,)]
    return [name for name in vectors if policy(algorithm, name).comes_down]


def _held(
    algorithm: Algorithm, fields: Mapping[str, Field], shared: Sequence[str], size: int
) -> dict[str, slice]:
    """The fields that clients keep between two averages, and what the server has of each."""
    names = [name for name in fields if policy(algorithm, name).kept_between]
    return {name: slice(size if name in shared else None) for name in names}


def _go_on(
    algorithm: Algorithm, server: Server, block: Block, kept: Kept, name: str, rows: Tensor
) -> None:
    """Clients whose own is newer than the server's copy begin with it."""
    for row, client in zip(rows, block.clients, strict=True):
        mine = kept.get(client)
        if mine and policy(algorithm, name).is_newer(int(mine[LAST]), server.round):
            row.copy_(mine[name])


def client_state(server: Server, kept: State) -> tuple[Tensor, Tensor]:
    """All weights and statistics of a client that keeps this, as it would be evaluated: the
    server's where it has none of its own. To be read only: nothing is copied that need not be."""
    own = kept.get(PERSONAL, server.personal)
    weights, buffers = server.model()
    weights = torch.cat([weights, own]) if own.numel() else weights
    return weights, kept.get(BUFFERS, buffers)


def _write_statistics(algorithm: Algorithm, server: Server, block: Block, kept: Kept) -> Tensor:
    """Give each client the statistics it begins with: its own, or the server's, which are the
    model's first unless they are averaged. Returns the steps behind them (C)."""
    held = {BUFFERS: server.buffers, STEPS: server.steps}
    rows = [held] * len(block.clients)
    if algorithm.statistics == "keep" and server.buffers.numel():
        rows = [held | kept.get(client, {}) for client in block.clients]
    buffers, steps = (torch.stack([row[name] for row in rows]) for name in (BUFFERS, STEPS))
    block.write_buffers(buffers, steps)
    return steps


def local_step(
    algorithm: Algorithm, rule: Rule, point: Point, state: State, lr: float, k: int
) -> None:
    """Step k of the client rule, with the gradient at that point."""
    w, g = point.weights, point.gradient
    limit(algorithm, w, g)
    if rule.lockstep:
        state["mean"] = point.cohort_mean(g)
    rule.apply(w, g, state, lr, k)


timed_step = timed("rule")(local_step)
"""The same where nothing is compiled: a compiler cannot see through who is told."""


def limit(algorithm: Algorithm, w: Tensor, g: Tensor) -> None:
    """Clip a gradient, and add weight decay to it, in place."""
    if algorithm.clip_norm is not None:
        norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        g.mul_((algorithm.clip_norm / norm).clamp_(max=1))
    if algorithm.weight_decay and not algorithm.groups:  # these have their own
        g.add_(w, alpha=algorithm.weight_decay)


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
    if any(policy(algorithm, name).kind == "derived" for name in server.shared):
        own, client_lr = mean["weights"], at(algorithm.client_lr, server.round)
        if algorithm.align:  # without what all clients moved by together
            own = own.sub(server.shared[MEAN_CHANGE], alpha=algorithm.align)
        own = unscaled(algorithm.groups, server.layout, own)
        found = algorithm.derive(own, server.shared, client_lr * algorithm.own_share, steps)
        for name in server.shared.keys() & found.keys():
            server.shared[name].copy_(found[name])
    if algorithm.align:
        server.shared[MEAN_CHANGE].copy_(mean["weights"])
    g = algorithm.pseudo_gradient(mean["weights"], steps)
    lr = at(algorithm.server_lr, server.round)
    rule = algorithm.server_rule().fit(server.layout)
    rule.apply(server.weights, g, server.optimiser, lr, 0)
    server.round += 1
    if algorithm.mean_of_rounds is not None:
        _take_mean(algorithm.mean_of_rounds, server)


def _take_mean(r: float, server: Server) -> None:
    """Move the mean over rounds towards what the server has now; a round in which it took no step
    is none."""
    held = server.over_rounds
    held["rounds"] += 1
    for name, now in (("weights", server.weights), (BUFFERS, server.buffers)):
        mean = held[name]
        share = (1 + r) / (held["rounds"].to(mean.dtype) + r)
        mean.lerp_(now.to(mean.dtype), share)


def codec_of(algorithm: Algorithm, name: str) -> Codec:
    """The codec of the weights' change or of a field; statistics are sent as they are."""
    if name == "weights":
        return codec(algorithm.upload)
    return codec("exact" if name == BUFFERS else policy(algorithm, name).codec)


def first_kept(algorithm: Algorithm, flat: FlatModel) -> State:
    """What a client keeps before it has taken part."""
    fields, weights = algorithm.client_rule().fields(flat.layout), flat.weights
    kept = {n: f.new(weights) for n, f in fields.items() if policy(algorithm, n).kind == "keep"}
    if algorithm.statistics == "keep" and (buffers := flat.read_buffers()).numel():
        kept |= {BUFFERS: buffers, STEPS: weights.new_zeros((), dtype=torch.int64)}
    if codec_of(algorithm, "weights").feedback:
        kept[LOST] = weights.new_zeros(flat.shared.size)
    shared = shared_fields(algorithm, fields, flat.layout)
    if held := _held(algorithm, fields, shared, flat.shared.size):
        kept |= {n: fields[n].new(weights)[part].clone() for n, part in held.items()}
        kept[LAST] = weights.new_zeros((), dtype=torch.int64)
    if (first := weights[flat.shared.size :]).numel():
        starts = {f"{PERSONAL}.{n}": torch.full_like(first, fields[n].start) for n in shared}
        kept |= {PERSONAL: first.clone()} | starts
    return kept


def traffic(
    algorithm: Algorithm, server: Server, clients: int, steps: int, answers: int | None = None
) -> dict[str, int]:
    """Exact bytes of a round, over all its clients, split into weights and optimiser state.

    answers is how many of the clients sent something back: all of them unless told.
    """
    answers = clients if answers is None else answers
    sent = {
        name: codec_of(algorithm, name).nbytes(server.layout, like)
        for name, like in server.values(algorithm).items()
    }
    got = {name: value.nbytes for name, value in server.broadcast(algorithm).items()}
    weights_up, weights_down = (n.pop("weights") + n.pop(BUFFERS, 0) for n in (sent, got))
    up, down = sum(sent.values()), sum(got.values())
    if algorithm.client_rule().lockstep:  # a gradient up and the mean gradient down in each step
        down += steps * server.weights.nbytes
        up += steps * server.weights.nbytes
    return {
        "bytes_up": answers * (weights_up + up),
        "bytes_down": clients * (weights_down + down),
        "bytes_up_weights": answers * weights_up,
        "bytes_up_state": answers * up,
        "bytes_down_weights": clients * weights_down,
        "bytes_down_state": clients * down,
    }
