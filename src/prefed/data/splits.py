"""Ways to divide the samples of a data set among clients; each sample goes to exactly one.

A split returns `Parts`, two index arrays, and is written without a loop over Python objects per
client where it can be: a million clients take seconds.
"""

import heapq
from typing import Any

import numpy as np

from prefed.core.errors import PrefedError
from prefed.data.dataset import SPLITS
from prefed.data.partition import Parts

Labels = np.ndarray[Any, Any]


def check_size(samples: int, clients: int, min_size: int) -> None:
    for name, value in (("clients", clients), ("min_size", min_size)):
        if value < 1:
            raise PrefedError(f"data.split.{name}: should be 1 or more, not {value}")
    if clients * min_size > samples:
        raise PrefedError(
            f"data.split: {clients} clients with at least {min_size} samples each "
            f"cannot be made of {samples} samples"
        )


def check_labels(labels: Labels, split: str) -> None:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise PrefedError(
            f"data.split: {split} needs one label for each sample; "
            f"this data set has none, use iid, quantity or natural"
        )


def _even(order: Labels, clients: int) -> Parts:
    """Consecutive parts of an order; sizes differ by at most one, the larger ones first."""
    small, more = divmod(len(order), clients)
    return Parts(order, np.cumsum(np.full(clients, small) + (np.arange(clients) < more)))


@SPLITS.register("iid")
def iid(labels: Labels, generator: np.random.Generator, *, clients: int) -> Parts:
    """Shuffled and dealt out: sizes differ by at most one.

    clients  how many
    """
    check_size(len(labels), clients, 1)
    return _even(generator.permutation(len(labels)), clients)


@SPLITS.register("dirichlet")
def dirichlet(
    labels: Labels,
    generator: np.random.Generator,
    *,
    clients: int,
    alpha: float,
    min_size: int = 1,
) -> Parts:
    """Each class is divided among the clients in proportions drawn from Dirichlet(alpha).

    Small alpha: few classes per client, and unequal sizes. A client left with fewer than
    min_size samples takes what it lacks from the client that has most, so this always ends.

    clients   how many
    alpha     the concentration
    min_size  the fewest samples of a client
    """
    check_size(len(labels), clients, min_size)
    check_labels(labels, "dirichlet")
    if not alpha > 0:
        raise PrefedError(f"data.split.alpha: should be greater than 0, not {alpha}")
    members, owners = [], []
    for label in np.unique(labels):
        members.append(generator.permutation(np.flatnonzero(labels == label)))
        shares = generator.dirichlet(np.full(clients, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members[-1])).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=len(members[-1]))
        owners.append(np.repeat(np.arange(clients), sizes))
    owner = np.concatenate(owners)
    order = np.concatenate(members)[np.argsort(owner, kind="stable")]
    parts = Parts(order, np.cumsum(np.bincount(owner, minlength=clients)))
    start = 0
    for end in parts.ends.tolist():
        if end - start > 1:  # a shuffle of one draws nothing
            generator.shuffle(order[start:end])
        start = end
    return _with_min_size(parts, min_size)


@SPLITS.register("quantity")
def quantity(
    labels: Labels,
    generator: np.random.Generator,
    *,
    clients: int,
    alpha: float,
    min_size: int = 1,
) -> Parts:
    """Classes as in iid, sizes in proportions drawn from Dirichlet(alpha): small alpha means that
    a few clients have almost everything. Clients below min_size are filled up as in dirichlet.

    clients   how many
    alpha     the concentration
    min_size  the fewest samples of a client
    """
    check_size(len(labels), clients, min_size)
    if not alpha > 0:
        raise PrefedError(f"data.split.alpha: should be greater than 0, not {alpha}")
    shares = generator.dirichlet(np.full(clients, alpha))
    ends = np.round(np.cumsum(shares) * len(labels)).astype(np.int64)
    ends[-1] = len(labels)
    return _with_min_size(Parts(generator.permutation(len(labels)), ends), min_size)


@SPLITS.register("shards")
def shards(
    labels: Labels, generator: np.random.Generator, *, clients: int, classes_per_client: int = 2
) -> Parts:
    """McMahan et al. 2017: samples sorted by class are cut into clients * classes_per_client
    shards, and each client gets that many at random. A shard across the border of two
    classes brings both. Sizes differ by at most classes_per_client.

    clients             how many
    classes_per_client  the shards of each
    """
    if classes_per_client < 1:
        raise PrefedError("data.split.classes_per_client: should be at least 1")
    check_size(len(labels), clients, classes_per_client)
    check_labels(labels, "shards")
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = clients * classes_per_client
    sizes = _even(by_class, count).sizes()
    owner_of_shard = generator.permutation(count) // classes_per_client
    owner = np.repeat(owner_of_shard, sizes)
    order = by_class[np.argsort(owner, kind="stable")]
    return Parts(order, np.cumsum(np.bincount(owner, minlength=clients)))


@SPLITS.register("natural")
def natural(
    labels: Labels, generator: np.random.Generator, keys: Labels | None, *, min_size: int = 1
) -> Parts:
    """By the key the data set brings: a client for each speaker, writer or user, in the order of
    their keys. Clients with fewer than min_size samples are left out with their samples.

    min_size  the fewest samples of a client
    """
    if keys is None:
        raise PrefedError(
            "data.split: natural needs a data set that says whose each sample is: shakespeare, "
            "synthetic, or an .npz with the array client"
        )
    _, owner = np.unique(keys, return_inverse=True)
    sizes = np.bincount(owner)
    order = np.argsort(owner, kind="stable")
    if not (sizes >= min_size).any():
        raise PrefedError(f"data.split.min_size: no client has {min_size} samples")
    order = order[sizes[owner[order]] >= min_size]
    return Parts(order, np.cumsum(sizes[sizes >= min_size]))


def _with_min_size(parts: Parts, min_size: int) -> Parts:
    """Clients below min_size are filled up, each from the one that has most at that moment. A
    giver never falls below min_size, and a taker gets no more, so every client is one or neither:
    moves need not be followed up, and all are carried out at once at the end."""
    sizes = parts.sizes()
    takers = np.flatnonzero(sizes < min_size)
    if len(takers) == 0:
        return parts
    givers = np.flatnonzero(sizes > min_size)
    starts = (parts.ends - sizes)[givers].tolist()
    # A giver as one number, for speed: the richest comes first, then the one of lower number.
    unit = len(givers)
    richest = (np.arange(unit) - sizes[givers] * unit).tolist()
    heapq.heapify(richest)
    first, counts, to = [], [], []  # of each move: position, how many, taker
    for taker, lacking in zip(takers.tolist(), (min_size - sizes[takers]).tolist(), strict=True):
        while lacking:
            giver = richest[0] % unit
            size = (giver - richest[0]) // unit
            count = min(lacking, size - min_size)
            first.append(starts[giver])
            counts.append(count)
            to.append(taker)
            starts[giver] += count
            lacking -= count
            if size - count > min_size:
                heapq.heapreplace(richest, richest[0] + count * unit)
            else:
                heapq.heappop(richest)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    sequence = np.arange(len(owner))
    ends = np.cumsum(counts)
    moved = np.repeat(np.array(first) - (ends - counts), counts) + np.arange(ends[-1])
    owner[moved] = np.repeat(to, counts)
    sequence[moved] = len(owner) + np.arange(len(moved))  # behind the taker's own, in this order
    order = parts.order[np.lexsort((sequence, owner))]
    return Parts(order, np.cumsum(np.bincount(owner, minlength=len(sizes))))
