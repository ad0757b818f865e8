"""What becomes of an update that began with an older version of the model.

With weight(s) of the staleness s, and the server's own copies as they are now:

    weights             change * weight(s); with mix="models" (client's model - now) * weight(s)
    averaged state      now + weight(s) * (client's - now): P, m, v, statistics (state="mix")
    control variates    client's change, whole: now + (client's - what it began with)
    derived state       worked out from the change that the server takes, as ever
    kept state          is the client's own, whatever its age

Averaged state is mixed and its changes are not added: a mixture of P's is never negative (or not
positive semi-definite), a sum of changes may be. A field that follows the participation (c of
SCAFFOLD) is the mean of what all clients keep: each client has moved its c_i whole, so c must
move by all of it, or it would be that mean no more.

Nothing happens to an update that is not old, if alpha is 1: then a round has its bits.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.rules import State
from prefed.training.asynchronous import Asynchronous
from prefed.training.server_state import BUFFERS, Server, policy


def brought_up_to_date(
    algorithm: Algorithm,
    rule: Asynchronous,
    now: Server,
    version: int,
    began: Server | None,
    values: State,
) -> State:
    """The values (C, ...) of clients that began with a version, as the server of now averages
    them. What the server was then is given if that `needs_beginning`."""
    age = now.round - version
    weight, share, is_old = rule.weight(age), rule.state_weight(age), age > 0
    found = {}
    for name, sent in values.items():
        if name == "weights":
            if is_old and rule.mix == "models":
                assert began is not None
                sent = sent + (began.weights - now.weights)
            found[name] = sent if weight == 1 else sent * weight
        elif name != BUFFERS and policy(algorithm, name).follow == "participation":
            found[name] = sent
            if is_old:
                assert began is not None
                found[name] = sent + (now.shared[name] - began.shared[name])
        else:
            found[name] = sent if share == 1 else torch.lerp(held(now, name), sent, share)
    return found


def with_all(names: Collection[str], now: Server, values: State) -> State:
    """The values (C, ...) with all of these names: a field that was not sent, because it was not
    due in the version that the clients began with, stands as the server has it."""
    rows = len(values["weights"])
    missing = [name for name in names if name not in values]
    return values | {name: held(now, name).expand(rows, *held(now, name).shape) for name in missing}


def held(now: Server, name: str) -> Tensor:
    """The server's copy of what clients send under that name."""
    return now.buffers if name == BUFFERS else now.shared[name]


def frozen(server: Server) -> Server:
    """A version to begin with, which stays as it is when the server steps."""
    return Server(
        round=server.round,
        weights=server.weights.clone(),
        buffers=server.buffers.clone(),
        optimiser={},
        shared={name: value.clone() for name, value in server.shared.items()},
        layout=server.layout,
        steps=server.steps.clone(),
        personal=server.personal,
    )


def needs_beginning(algorithm: Algorithm, rule: Asynchronous) -> bool:
    """Whether an update can be used only beside the version that it began with."""
    moves = any(p.follow == "participation" for p in algorithm.sharing().values())
    return rule.mix == "models" or moves
