"""What this machine has."""

import os

import torch


def total_memory(device: torch.device | None = None) -> int:
    """The memory of a device, or of this machine, in bytes. All of it, not what is free: what is
    decided by it must not change from run to run."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
