"""The way from a client to the server, the same in a simulation and between machines.

    upload     on the client: what local_update left -> message, and what the client keeps
    receive    on the server: message -> the values that were sent, as far as the codecs keep them

A message is exactly the bytes that are counted: `receive` refuses any other.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.codecs import Codec, Parts
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout
from prefed.core.parts import timed
from prefed.rules import State
from prefed.training.round import LOCAL_STEPS, LOST, Kept, Server, Update, codec_of

Message = dict[str, Parts]
"""For each value that is sent, the parts its codec makes of it, with a row for each client."""


@timed("codecs")
def upload(
    algorithm: Algorithm,
    server: Server,
    update: Update,
    clients: Sequence[int],
    kept: Kept,
    seed: int,
) -> tuple[Message, State]:
    """The message of a block of clients, and what stays with them. `server` is the global state
    that they began with."""
    message, stays = {}, update.kept
    for name, rows in update.values.items():
        way = codec_of(algorithm, name)
        noise = partial(draws.noise, seed, f"codec {name}", server.round, clients)
        if way.feedback:
            rows = rows.clone()
            for row, client in zip(rows, clients, strict=True):
                if client in kept:
                    row.add_(kept[client][LOST])
        message[name] = way.encode(rows, server.layout, noise)
        if way.feedback:
            arrived = way.decode(message[name], server.layout, server.weights)
            stays = stays | {LOST: rows.sub_(arrived)}
    return message, stays


@timed("codecs")
def receive(algorithm: Algorithm, server: Server, message: Message) -> State:
    """The values, with a row for each client. The message may come from anywhere. What is averaged
    is `Algorithm.before_mean` of them."""
    wanted = server.values(algorithm)
    if message.keys() != wanted.keys():
        raise PrefedError(
            f"a message should have the values {', '.join(wanted)}, not {', '.join(message)}"
        )
    if len({len(part) for parts in message.values() for part in parts.values()}) != 1:
        raise PrefedError("a message should have a row for each client in every part")
    values = {}
    for name, like in wanted.items():
        way = codec_of(algorithm, name)
        _check(name, message[name], way, server.layout, like)
        values[name] = way.decode(message[name], server.layout, like)
    return values


def _check(name: str, parts: Parts, way: Codec, layout: Layout, like: Tensor) -> None:
    found = {part: (tuple(value.shape[1:]), value.dtype) for part, value in parts.items()}
    form = {part: (shape, dtype) for part, (dtype, shape) in way.form(layout, like).items()}
    if found != form:
        raise PrefedError(f"{name}: a message should have the parts {form}, not {found}")


def to_mean(algorithm: Algorithm, values: State, steps: Tensor) -> State:
    """What is averaged of the values that clients sent, who took so many local steps: float64, (1)
    for a client or (C, 1)."""
    return algorithm.before_mean(values | {LOCAL_STEPS: steps}) | {LOCAL_STEPS: steps}


def mean_steps(mean: State) -> float:
    """The mean number of local steps. Where all clients took equally many, it is that number,
    whatever the rounding of their weights."""
    steps = float(mean[LOCAL_STEPS])
    return round(steps) if math.isclose(steps, round(steps), rel_tol=1e-12) else steps


def averaged(algorithm: Algorithm, server: Server) -> State:
    """Names, types and shapes of the values that are averaged in this round."""
    one = server.weights.new_ones(1, dtype=torch.float64)
    return to_mean(algorithm, server.values(algorithm), one)


def depends_on_steps(algorithm: Algorithm, server: Server) -> bool:
    """Whether the server needs to know how many local steps the clients took."""
    if any(policy.kind == "derived" for policy in algorithm.sharing().values()):
        return True
    sent = {name: torch.ones_like(value) for name, value in server.values(algorithm).items()}
    found = []
    for steps in (1, 2):
        values = to_mean(algorithm, sent, torch.tensor([float(steps)], dtype=torch.float64))
        change = values["weights"].to(server.weights.dtype, copy=True)
        found.append(algorithm.pseudo_gradient(change, steps))
    return not torch.equal(*found)
