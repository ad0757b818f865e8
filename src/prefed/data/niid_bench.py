"""The splits by label of NIID-Bench (Li et al. 2022), as its code has them."""

from typing import Any

import numpy as np

from prefed.core.errors import PrefedError
from prefed.data.dataset import SPLITS
from prefed.data.partition import Parts
from prefed.data.splits import Labels, check_labels, check_size

Has = np.ndarray[Any, np.dtype[np.bool_]]
"""(clients, labels): who has which."""
ATTEMPTS = 1000
"""Draws of `dirichlet-balanced`, after which it gives up."""


@SPLITS.register("labels")
def labels_per_client(
    labels: Labels,
    generator: np.random.Generator,
    *,
    clients: int,
    per_client: int | None = None,
    sets: list[list[int]] | None = None,
) -> Parts:
    """NIID-Bench's #C = k: every client has samples of `per_client` labels and of no other.

    Client i has the label i modulo their number, and others drawn at random; the samples of a
    label are divided evenly among the clients that have it.

    clients     how many; at least as many as labels, if these are drawn
    per_client  the labels of each, 2 if nothing is said
    sets        the labels of each client by name, in place of drawn ones: [[0, 7], [1, 6], ...]
    """
    check_labels(labels, "labels")
    names = np.unique(labels)
    if sets is None:
        has = _drawn(names, generator, clients, 2 if per_client is None else per_client)
    elif per_client is None:
        has = _given(names, sets)
    else:
        raise PrefedError("data.split: give per_client or sets, not both")
    if len(has) != clients:
        raise PrefedError(f"data.split.sets: there are {len(has)} for {clients} clients")
    parts: list[list[Labels]] = [[] for _ in range(clients)]
    for column, label in enumerate(names):
        owners = np.flatnonzero(has[:, column])
        members = generator.permutation(np.flatnonzero(labels == label))
        for owner, part in zip(owners, np.array_split(members, len(owners)), strict=True):
            parts[owner].append(part)
    found = [np.concatenate(part) for part in parts]
    if (empty := next((c for c, part in enumerate(found) if not len(part)), None)) is not None:
        raise PrefedError(
            f"data.split: client {empty} would have no sample, since its labels have fewer samples "
            f"than clients; take fewer clients"
        )
    return _parts(found)


def _drawn(names: Labels, generator: np.random.Generator, clients: int, per_client: int) -> Has:
    if not 1 <= per_client <= len(names):
        raise PrefedError(f"data.split.per_client: should be from 1 to {len(names)}, the labels")
    if clients < len(names):
        raise PrefedError(
            f"data.split.clients: {clients} are fewer than the {len(names)} labels, and samples "
            f"of some would have no client; take more, or the split shards"
        )
    has = np.zeros((clients, len(names)), bool)
    for client in range(clients):
        first = client % len(names)
        others = np.delete(np.arange(len(names)), first)
        has[client, [first, *generator.permutation(others)[: per_client - 1]]] = True
    return has


def _given(names: Labels, sets: list[list[int]]) -> Has:
    has = np.zeros((len(sets), len(names)), bool)
    for client, own in enumerate(sets):
        if not own or not np.isin(own, names).all():
            raise PrefedError(
                f"data.split.sets: client {client} should have one or more of the labels "
                f"{names.tolist()}, not {own}"
            )
        has[client] = np.isin(names, own)
    if not has.any(0).all():
        missing = names[~has.any(0)].tolist()
        raise PrefedError(f"data.split.sets: no client has the labels {missing}")
    return has


@SPLITS.register("dirichlet-balanced")
def dirichlet_balanced(
    labels: Labels,
    generator: np.random.Generator,
    *,
    clients: int,
    alpha: float,
    min_size: int = 10,
) -> Parts:
    """NIID-Bench's Dirichlet split: as dirichlet, but a client that has its even share of all
    samples gets none of the labels that follow, and all is drawn again until each client has
    min_size samples.

    clients   how many
    alpha     the concentration
    min_size  the fewest samples of a client
    """
    check_labels(labels, "dirichlet-balanced")
    check_size(len(labels), clients, min_size)
    if not alpha > 0:
        raise PrefedError(f"data.split.alpha: should be greater than 0, not {alpha}")
    for _ in range(ATTEMPTS):
        parts: list[list[Labels]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, np.int64)
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(clients, alpha)) * (sizes < len(labels) / clients)
            if shares.sum() == 0:  # all of them too small for a float
                shares = (sizes < len(labels) / clients).astype(float)
            cuts = (np.cumsum(shares / shares.sum()) * len(members)).astype(np.int64)[:-1]
            for client, part in enumerate(np.split(members, cuts)):
                parts[client].append(part)
                sizes[client] += len(part)
        if sizes.min() >= min_size:
            return _parts([generator.permutation(np.concatenate(part)) for part in parts])
    raise PrefedError(
        f"data.split: in {ATTEMPTS} draws some client always had fewer than {min_size} samples; "
        f"raise alpha, lower min_size or clients, or take the split dirichlet, which fills up"
    )


def _parts(of_clients: list[Labels]) -> Parts:
    return Parts(np.concatenate(of_clients), np.cumsum([len(part) for part in of_clients]))
