"""How many vectors as long as the weights a run needs at least, by what its algorithm declares."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.layout import Layout
from prefed.training.messages import averaged
from prefed.training.server_state import Server


@dataclass(frozen=True)
class Vectors:
    """In multiples of the weights, for clients that are trained one after another and keep
    nothing."""

    given: float
    """The model that was handed in, which stays as it is."""
    server: float
    """The weights, the state of the server rule, the copy of what clients share, and the mean over
    rounds."""
    mean: float
    """A sum of everything that is averaged."""
    client: float
    """The weights, the gradient and the state of the client rule: for each worker."""

    def of(self, workers: int = 1) -> float:
        return self.given + self.server + self.mean + workers * self.client


def needed(algorithm: Algorithm, layout: Layout) -> Vectors:
    """Nothing as long as the weights is made for it."""
    weights = torch.empty(layout.size, device="meta")
    server = Server.start(algorithm, layout, weights, weights[:0])
    server_state = server.optimiser, server.shared, server.over_rounds

    def length(tensors: Iterable[Tensor]) -> float:
        return sum(tensor.numel() for tensor in tensors) / layout.size

    fields = algorithm.client_rule().fit(layout).fields(layout).values()
    return Vectors(
        given=1.0,
        server=1 + sum(map(length, (held.values() for held in server_state))),
        mean=length(averaged(algorithm, server).values()),
        client=2 + length(field.new(weights) for field in fields),
    )
