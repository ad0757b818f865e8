"""The global state, and what each value is called that clients send or keep."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.algorithms import Algorithm, Policy, reset
from prefed.codecs import Codec, codec
from prefed.core.layout import Layout
from prefed.rules import Field, State
from prefed.rules.wrapped import MEAN_CHANGE

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


def policies(algorithm: Algorithm, fields: Iterable[str]) -> dict[str, Policy]:
    """What happens to each of these fields at the end of a round."""
    chosen = algorithm.sharing()
    return {name: chosen.get(name, reset()) for name in fields}


def policy(algorithm: Algorithm, field: str) -> Policy:
    return policies(algorithm, [field])[field]


def codec_of(algorithm: Algorithm, name: str) -> Codec:
    """The codec of the weights' change or of a field; statistics are sent as they are."""
    if name == "weights":
        return codec(algorithm.upload)
    return codec("exact" if name == BUFFERS else policy(algorithm, name).codec)


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
        chosen = policies(algorithm, client)
        shared = {name: field for name, field in client.items() if chosen[name].comes_down}
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
        chosen = policies(algorithm, self.shared)
        sent = {name: v for name, v in self.shared.items() if chosen[name].sent(self.round)}
        return {"weights": self.weights} | self._statistics(algorithm) | sent

    def _statistics(self, algorithm: Algorithm) -> State:
        return {BUFFERS: self.buffers} if algorithm.statistics == "average" else {}

    def take_mean_of_rounds(self, r: float) -> None:
        """Move the mean over rounds towards what the server has now; a round in which it took no
        step is none."""
        held = self.over_rounds
        held["rounds"] += 1
        for name, now in (("weights", self.weights), (BUFFERS, self.buffers)):
            mean = held[name]
            share = (1 + r) / (held["rounds"].to(mean.dtype) + r)
            mean.lerp_(now.to(mean.dtype), share)
