"""Ways to divide the samples of a data set among clients; each sample goes to exactly one."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefed.data.registry import SPLITS
from prefed.errors import PrefedError

Labels = np.ndarray[Any, Any]


def _check_size(samples: int, clients: int, min_size: int) -> None:
    if clients < 1 or min_size < 1 or clients * min_size > samples:
        raise PrefedError(
            f"data.split: {clients} clients with at least {min_size} samples each "
            f"cannot be made of {samples} samples"
        )


@SPLITS.register("iid")
def iid(labels: Labels, generator: np.random.Generator, *, clients: int) -> list[Labels]:
    """Shuffled and dealt out: sizes differ by at most one."""
    _check_size(len(labels), clients, 1)
    return np.array_split(generator.permutation(len(labels)), clients)


@SPLITS.register("dirichlet")
def dirichlet(
    labels: Labels,
    generator: np.random.Generator,
    *,
    clients: int,
    alpha: float,
    min_size: int = 1,
) -> list[Labels]:
    """Each class is divided among the clients in proportions drawn from Dirichlet(alpha).

    Small alpha: few classes per client, and unequal sizes. A client left with fewer than
    min_size samples takes what it lacks from the client that has most, so this always ends.
    """
    _check_size(len(labels), clients, min_size)
    if not alpha > 0:
        raise PrefedError(f"data.split.alpha: should be greater than 0, not {alpha}")
    pieces: list[list[Labels]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(clients, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for owned, piece in zip(pieces, np.split(members, cuts), strict=True):
            owned.append(piece)
    parts = [generator.permutation(np.concatenate(owned)) for owned in pieces]
    for client in range(clients):
        while (lacking := min_size - len(parts[client])) > 0:
            giver = max(range(clients), key=lambda c: len(parts[c]))
            take = min(lacking, len(parts[giver]) - min_size)
            parts[client] = np.concatenate([parts[client], parts[giver][:take]])
            parts[giver] = parts[giver][take:]
    return parts
