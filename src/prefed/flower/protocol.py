"""The names that server and nodes of a deployed config agree on."""

import hashlib
from dataclasses import dataclass
from typing import Any

from prefed.core.errors import PrefedError

SERVER = "server"
"""ArrayRecord: the global state, as `Server.broadcast` names it."""
ASK = "ask"
"""ConfigRecord of what is asked: ROUND, STEPS, CLIENTS, AFTER, RUN, CONFIG."""
ROUND = "round"
STEPS = "steps"
"""The local steps behind the statistics, which the counters of a model go by."""
CLIENTS = "clients"
AFTER = "prefed-after"
"""For each client, the round it last took part in, or -1."""
RUN = "run"
CONFIG = "config"
"""The fingerprint of the config, which both sides must have alike."""
NODE = "node"
"""ConfigRecord of a node's answer to a query: PARTITION, PARTITIONS, CONFIG."""
PARTITION = "partition-id"
PARTITIONS = "num-partitions"
SAMPLES = "num-examples"
LOSS = "train_loss"
EVALUATION_LOSS = "loss"
ACCURACY = "accuracy"
CLIENT = "client"
STATE = "prefed-state"
"""ArrayRecord beside a stock app's arrays: what its clients share."""
ALGORITHM = "prefed-algorithm"
BUFFERS = "prefed-buffers"
PERSONAL = "prefed-personal"
"""In a stock app's config: the names of the parameters that stay with clients."""
PRIVATE = "prefed-private"
"""In a stock app's config: the server adds noise to every parameter."""
MEAN = "prefed-mean"
"""In a stock app's config: the option whose mean measures distances between clients, or empty."""
QUESTION = "prefed-question"
"""In a stock app's config: `local_train` is to answer without training."""
TRAINED = "prefed-round"
"""Metric of `local_train`: the round it trained in."""
STEPS = "local-steps"
"""Metric: how many local steps a client took."""


@dataclass(frozen=True)
class Ask:
    """What a server wants of a node."""

    round: int
    steps: int
    clients: list[int]
    after: list[int]
    run: str
    config: str

    @classmethod
    def read(cls, record: Any) -> "Ask":
        """From a record that came in; nothing in it is known to be true."""
        keys = {"round": ROUND, "steps": STEPS, "clients": CLIENTS, "after": AFTER, "run": RUN,
                "config": CONFIG}  # fmt: skip
        kinds = {"round": int, "steps": int, "clients": list, "after": list, "run": str,
                 "config": str}  # fmt: skip
        try:
            found = {name: record[key] for name, key in keys.items()}
            whole = all(type(found[name]) is kind for name, kind in kinds.items())
            numbers = [found["round"], *found["clients"], *found["after"]]
            if not whole or any(type(number) is not int for number in numbers):
                raise TypeError
        except (KeyError, TypeError):
            raise PrefedError("the server's message is not one of prefed's") from None
        return cls(**found)


def update_key(client: int) -> str:
    return f"update-{client}"


def about_key(client: int) -> str:
    return f"about-{client}"


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hosted(client: int, partitions: int) -> int:
    """The partition, and with it the node, that a client lives on."""
    return client % partitions
