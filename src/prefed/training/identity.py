"""What a run is of, written down: enough to tell it from another one, not to run it again."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.core.batch import Ragged, leaves
from prefed.core.hashes import digest
from prefed.core.plain import name_of, plain
from prefed.data import FederatedData, Partition
from prefed.data.samples import LazySamples, Samples
from prefed.training.result import tensors_of
from prefed.training.settings import Settings


def identity(
    algorithm: Algorithm, model: nn.Module, data: FederatedData, settings: Settings, loss: Any
) -> dict[str, Any]:
    """A table as a config has it, with what can be known of a model and of data that were made in
    Python: their kind and size, and hashes of the first weights, and of the sizes of the clients
    and the samples of the first."""
    kind = {"name": ALGORITHMS.name_of(type(algorithm)), **algorithm.model_dump()}
    table = {
        **settings.to_dict(),
        "loss": loss if loss is None or isinstance(loss, str | Mapping) else name_of(loss),
        "algorithm": kind,
        "model": {
            "python": type(model).__qualname__,
            "weights": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "sha256": digest(*tensors_of(model).values()),
        },
        "data": _data(data),
    }
    return plain(table)  # type: ignore[no-any-return]


def _data(data: FederatedData) -> dict[str, Any]:
    """Clients that are made when they are needed are counted, and not made for this."""
    sizes: np.ndarray[Any, Any] | None = None
    if isinstance(data.clients, Partition):
        sizes = data.clients.parts.sizes()
    elif isinstance(data.clients, list | tuple):
        sizes = np.array([len(data.client(c)) for c in range(len(data))])
    return {
        "python": type(data.clients).__qualname__,
        "clients": len(data),
        "samples": None if sizes is None else int(sizes.sum()),
        "test": 0 if data.test is None else len(data.test),
        "sha256": digest(
            *_values(data.client(0)),
            torch.as_tensor([] if sizes is None else sizes),
            *(_values(data.client_test(0)) if data.client_tests is not None else ()),
        ),
    }


def _values(samples: Samples) -> tuple[Tensor, ...]:
    """Samples that are read on demand are not read for this: they may be many, and may differ each
    time."""
    if isinstance(samples, LazySamples):
        return (torch.tensor(len(samples)),)
    x, y = samples.all()
    arrays = [[v.used(), v.lengths] if isinstance(v, Ragged) else [v] for v in (*leaves(x), y)]
    return tuple(array for of_one in arrays for array in of_one)
