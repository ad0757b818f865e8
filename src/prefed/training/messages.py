"""The way from a client to the server, the same in a simulation and between machines.

    upload     on the client: what local_update left -> message, and what the client keeps
    receive    on the server: message -> the values that were sent, as far as the codecs keep them
    exchange   both, in a simulation: the same values, with less memory

A message is exactly the bytes that are counted: `receive` refuses any other.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.codecs import Codec, Parts
from prefed.codecs.interface import Blockwise
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.core.hands import Hands
from prefed.core.layout import Layout
from prefed.core.parts import timed
from prefed.rules import State
from prefed.training.round import Update
from prefed.training.server_state import LOCAL_STEPS, LOST, Kept, Server, codec_of

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
        message[name], lost = _encode(algorithm, server, name, rows, clients, kept, seed)
        stays = stays | lost
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
    return {name: _decode(algorithm, server, name, message[name]) for name in wanted}


def exchange(
    algorithm: Algorithm,
    server: Server,
    update: Update,
    clients: Sequence[int],
    kept: Kept,
    seed: int,
    hands: Hands | None = None,
) -> tuple[State, State]:
    """What `receive` makes of the message of `upload`, and what stays with the clients, where both
    are in one process. A codec that works block by block writes over the update's own values and
    takes the memory of a block, unless clients keep what they send; where they train in C, by some
    hands, it works in C."""
    values, stays = {}, update.kept
    for name in server.values(algorithm):
        rows, way = update.values[name], codec_of(algorithm, name)
        if isinstance(way, Blockwise) and name not in update.kept:
            way.send(rows, _noise(seed, name, server, clients), hands)
            values[name] = rows
        else:
            parts, lost = _encode(algorithm, server, name, rows, clients, kept, seed)
            values[name], stays = _decode(algorithm, server, name, parts), stays | lost
    return values, stays


def _encode(
    algorithm: Algorithm,
    server: Server,
    name: str,
    rows: Tensor,
    clients: Sequence[int],
    kept: Kept,
    seed: int,
) -> tuple[Parts, State]:
    """The parts of one value, and what the codec has clients keep of it."""
    way, noise = codec_of(algorithm, name), _noise(seed, name, server, clients)
    if not way.feedback:
        return way.encode(rows, server.layout, noise), {}
    rows = rows.clone()
    for row, client in zip(rows, clients, strict=True):
        if client in kept:
            row.add_(kept[client][LOST])
    parts = way.encode(rows, server.layout, noise)
    return parts, {LOST: rows.sub_(way.decode(parts, server.layout, server.weights))}


def _noise(seed: int, name: str, server: Server, clients: Sequence[int]) -> draws.Noise:
    return draws.Noise(seed, f"codec {name}", server.round, clients)


def _decode(algorithm: Algorithm, server: Server, name: str, parts: Parts) -> Tensor:
    way, like = codec_of(algorithm, name), server.values(algorithm)[name]
    _check(name, parts, way, server.layout, like)
    found = way.decode(parts, server.layout, like)
    if found.shape[1:] != like.shape:
        raise PrefedError(
            f"{type(way).__name__}.decode: gives {list(found.shape)} for rows of {name}, which are "
            f"of the shape {list(like.shape)}"
        )
    return found


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
