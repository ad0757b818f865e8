"""The names that server and nodes of a deployed config agree on."""

from __future__ import annotations

import hashlib

SERVER = "server"
"""ArrayRecord: the global state, as `Server.averaged` names it."""
ASK = "ask"
"""ConfigRecord of what is asked: ROUND, CLIENTS, AFTER, RUN, CONFIG."""
ROUND = "round"
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
CLIENT = "client"
STATE = "prefed-state"
"""ArrayRecord beside a stock app's arrays: what its clients share."""
ALGORITHM = "prefed-algorithm"
BUFFERS = "prefed-buffers"


def update_key(client: int) -> str:
    return f"update-{client}"


def about_key(client: int) -> str:
    return f"about-{client}"


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hosted(client: int, partitions: int) -> int:
    """The partition, and with it the node, that a client lives on."""
    return client % partitions
