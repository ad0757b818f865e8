"""A share of each client's samples that is held out to test the client on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from prefed.core import draws
from prefed.data.partition import Clients, Partition
from prefed.data.samples import Samples

if TYPE_CHECKING:
    from prefed.data.federated import FederatedData


class HeldOut(Sequence[Samples]):
    """Clients with a part of their samples: those that are held out (0), or the rest (1)."""

    def __init__(self, data: "FederatedData", share: float, seed: int, part: int) -> None:
        self.data, self.share, self.seed, self.part = data, share, seed, part

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < len(self):
            raise IndexError(client)
        samples = self.data.client(client)
        drawn = draws.held_out(self.seed, client, len(samples), self.share)[self.part]
        return samples.part(samples.numbers(torch.from_numpy(drawn)))


def part_of(data: "FederatedData", share: float, seed: int, part: int) -> Clients:
    clients = data.clients
    if not isinstance(clients, Partition):
        return HeldOut(data, share, seed, part)
    numbers = [
        own[draws.held_out(seed, client, len(own), share)[part]]
        for client, own in enumerate(clients.parts)
    ]
    return Partition.of(clients.whole, numbers)
