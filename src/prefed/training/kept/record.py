"""What one client keeps, as bytes of a fixed length."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from prefed.rules import State

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

ALIGNED = 16
"""Every tensor begins at a multiple of this many bytes."""


class Form:
    """How records are laid out: tensor after tensor, as in `like`."""

    def __init__(self, like: State) -> None:
        self.like = like
        self.places: dict[str, slice] = {}
        end = 0
        for name, value in like.items():
            self.places[name] = slice(end, end + value.nbytes)
            end += -(-value.nbytes // ALIGNED) * ALIGNED
        self.size = end

    def new(self) -> Bytes:
        return np.zeros(self.size, np.uint8)

    def pack(self, state: State, record: Bytes) -> None:
        for name, place in self.places.items():
            value = state[name].detach().cpu().contiguous()
            record[place] = value.reshape(-1).view(torch.uint8).numpy()

    def unpack(self, record: Bytes, device: torch.device) -> State:
        """Views of the record, if they are to be where it is."""
        return {name: value.to(device) for name, value in self._views(record)}

    def _views(self, record: Bytes) -> Iterator[tuple[str, Tensor]]:
        data = torch.from_numpy(record)
        for name, place in self.places.items():
            like = self.like[name]
            yield name, data[place].view(like.dtype).view(like.shape)


def check_sum(record: Bytes) -> int:
    """The first eight bytes of its SHA-256, as a signed number."""
    return int.from_bytes(hashlib.sha256(record.data).digest()[:8], "little", signed=True)
