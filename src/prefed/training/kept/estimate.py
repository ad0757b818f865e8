"""In memory or on disk: decided by how much clients may come to keep, before the first round."""

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch

from prefed.core.errors import PrefedError
from prefed.core.machine import free_memory
from prefed.rules import State
from prefed.training.kept.disk import OnDisk
from prefed.training.kept.record import Form
from prefed.training.kept.store import Store

log = logging.getLogger("prefed")

Where = Literal["auto", "memory", "disk"]

OVERHEAD = 1000
"""Bytes that a tensor in memory takes besides its numbers."""
COPIES = 4.5
"""The peak of memory while a checkpoint of kept state is written, over that state: measured."""
SHARE = 0.5
"""Of the memory that is free, what kept state may take; the rest is for all else."""
COPIED = 1 << 29
"""Bytes of kept state that checkpoints may copy: some five seconds for each of them."""
LARGE = 1 << 28
"""Bytes of kept state that are worth a line in the log."""


def settle(
    held: Store,
    where: Where,
    like: State,
    clients: int,
    most: int,
    folder: Path | None,
    device: torch.device,
) -> Store:
    """What a run goes on with, and holds what `held` does; one line in the log says so if it is
    worth it.

    like     what one client keeps
    clients  how many there are
    most     how many of them may come to take part
    folder   of the run, if it is written down
    """
    if not like:
        return held
    record = Form(like).size
    total = f"up to {most:,} clients x {size(record)} = {size(most * record)}"
    if isinstance(held, OnDisk):
        _check_room(total, (most - len(held)) * record, folder)
        return held
    copies = 1.0 if folder is None else COPIES
    needed = int(most * (record + OVERHEAD * len(like)) * copies)
    free = free_memory(device)
    fits = needed <= SHARE * free
    why = f"{size(needed)}{' with checkpoints' if folder else ''}, {size(free)} are free"
    quick = folder is None or most * record <= COPIED
    if where == "memory" or (where == "auto" and fits and quick):
        if not fits:
            text = 'kept state: %s, in memory, where it may not fit (%s); set kept_state = "disk"'
            log.warning(text, total, why)
        elif most * record >= LARGE:
            log.info("kept state: %s, in memory (%s)", total, why)
        return held
    room = _check_room(total, most * record, folder)
    store = OnDisk(folder, like, clients, device)
    if held:
        store.put(0, held)
    name = f"{store.name} ({size(room)} are free there)"
    reason = "" if where == "disk" else f"; in memory it would be {why}"
    if where == "auto" and fits:
        reason = "; checkpoints would copy it from memory"
    log.info("kept state: %s, on disk: %s%s", total, name, reason)
    return store


def _check_room(total: str, needed: int, folder: Path | None) -> int:
    """The bytes that are free where the file is, or is to be: enough, or nothing begins."""
    place = Path(tempfile.gettempdir()) if folder is None else folder
    room = shutil.disk_usage(place).free
    if needed > room:
        elsewhere = " (out, or TMPDIR)" if folder is None else ""
        raise PrefedError(
            f"kept_state: {total} would not fit on the disk: {place} has {size(room)}. Take a "
            f"directory{elsewhere} on a larger disk, fewer clients or rounds, or an algorithm "
            f"whose clients keep less"
        )
    return room


def size(count: int) -> str:
    """Bytes in words."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"
