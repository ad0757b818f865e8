"""Safetensors files that are written piece by piece: safetensors.torch.save would hold two more
copies of all that is in them, and Python's lock meanwhile."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

PIECE = 1 << 22
"""Bytes that are hashed and written at a time."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""As the format calls them."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> str:
    """Write the file, flush it to the disk, and return its SHA-256. Not whole or not at all: give
    it another name first. `about` is said in its head."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    table: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name in order:
        value, begin = tensors[name], end
        end += value.nbytes
        kind = DTYPES[value.dtype]
        table[name] = {"dtype": kind, "shape": [*value.shape], "data_offsets": [begin, end]}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    size, found = len(head).to_bytes(8, "little"), hashlib.sha256()
    with open(path, "wb") as file:
        for piece in chain([size, head], _pieces(tensors[name] for name in order)):
            found.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return found.hexdigest()


def _pieces(tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    for tensor in tensors:
        flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (flat[first : first + PIECE] for first in range(0, len(flat), PIECE))
