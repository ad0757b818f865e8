"""What tensors are told by."""

import hashlib

import torch
from torch import Tensor


def digest(*arrays: Tensor) -> str:
    """16 digits of the SHA-256 of their types, shapes and bits, in order."""
    found = hashlib.sha256()
    for values in arrays:
        flat = values.detach().cpu().contiguous().reshape(-1)
        found.update(f"{flat.dtype} {tuple(values.shape)}".encode())
        found.update(flat.view(torch.uint8).numpy().data if len(flat) else b"")
    return found.hexdigest()[:16]
