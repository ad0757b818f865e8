import numpy as np
import torch

from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.data.dataset import DATASETS, Dataset

FEATURES, CLASSES = 60, 10


@DATASETS.register("synthetic")
def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    iid: bool = False,
    largest: int = 5000,
    seed: int = 0,
) -> Dataset:
    """The synthetic(alpha, beta) logistic task of Li et al. 2020 (FedProx), with its own clients.

    Client k draws u_k ~ N(0, alpha) and B_k ~ N(0, beta), a model W_k, b_k ~ N(u_k, 1) and a mean
    v_k ~ N(B_k, 1); x ~ N(v_k, diag(j^-1.2)) and y = argmax(W_k x + b_k). Sizes are
    lognormal(4, 2) + 50, here with an upper bound. alpha and beta are standard deviations, as in
    the authors' code. A tenth of each client's samples is for testing.

    alpha    how much the clients' models differ
    beta     how much their inputs differ
    clients  how many
    iid      one model and one mean for all clients
    largest  no client has more samples (lognormal has no bound)
    seed     of the task; the run's seed does not change it
    """
    if clients < 1 or alpha < 0 or beta < 0 or largest < 50:
        raise PrefedError("data: clients from 1, alpha and beta from 0 and largest from 50 upwards")
    common = draws.generator(seed, "synthetic")
    sizes = np.minimum(common.lognormal(4, 2, clients) + 50, largest).astype(np.int64)
    scale = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)
    shared = common.normal(0, 1, (FEATURES, CLASSES)), common.normal(0, 1, CLASSES)
    pieces = []
    for client, size in enumerate(sizes):
        rng = draws.generator(seed, "synthetic client", 0, client)
        u, B = rng.normal(0, alpha), rng.normal(0, beta)
        W, b = rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)
        v = rng.normal(B, 1, FEATURES)
        if iid:
            (W, b), v = shared, np.zeros(FEATURES)
        x = rng.normal(v, scale, (size, FEATURES))
        pieces.append((x.astype(np.float32), (x @ W + b).argmax(1), np.full(size, client)))
    cuts = [max(1, size // 10) for size in sizes]
    train = [(x[c:], y[c:], k[c:]) for (x, y, k), c in zip(pieces, cuts, strict=True)]
    test = [(x[:c], y[:c], k[:c]) for (x, y, k), c in zip(pieces, cuts, strict=True)]
    inputs, targets, owner = (torch.from_numpy(np.concatenate(a)) for a in zip(*train, strict=True))
    held = [torch.from_numpy(np.concatenate(a)) for a in zip(*test, strict=True)]
    return Dataset(inputs, targets, (held[0], held[1]), None, owner, CLASSES)
