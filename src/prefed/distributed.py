"""A run on several processes or machines: `torchrun --nproc-per-node N -m prefed run CONFIG`.

Every rank has the whole global state, draws the same cohort, and trains its share of it. The mean
is a fixed tree over the cohort (mean.py): a rank adds up the subtrees it owns and hands them to a
lower rank, which goes on adding, up to rank 0; from there the mean comes back to all, and every
rank takes the same server step. So the bits do not depend on the number of ranks.

Outside of a process group everything here is a function call that does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prefed.errors import RankLost
from prefed.mean import Mean, Part
from prefed.rules.base import State

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""A rank that is silent for longer is taken for dead."""


def start() -> None:
    """Join the process group that torchrun has set up, if there is one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)


def stop() -> None:
    if _together():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if _together() else 0


def share(items: Sequence[T]) -> Sequence[T]:
    """This rank's items: neighbours, and no rank is idle while a higher one has work."""
    if not _together():
        return items
    ranks, me = dist.get_world_size(), dist.get_rank()
    each, more = divmod(len(items), ranks)
    first = me * each + min(me, more)
    return items[first : first + each + (me < more)]


def mean(collected: Mean, like: State) -> tuple[State, float]:
    """The mean over the clients of all ranks, with the bits of a single process. `like` has the
    names and shapes of the values, for ranks without a client."""
    if not _together():
        return collected.result()
    ranks, me, distance = dist.get_world_size(), dist.get_rank(), 1
    with _watching():
        while distance < ranks:
            if me % (2 * distance) == distance:
                _send(collected.parts(), like, me - distance)
            elif me % (2 * distance) == 0 and me + distance < ranks:
                for part in _receive(like, me + distance):
                    collected.add_part(part)
            distance *= 2
        values, loss = collected.result() if me == 0 else (like, 0.0)
        packed = _pack({name: values[name] for name in like})
        number = torch.tensor([loss], dtype=torch.float64, device=packed.device)
        dist.broadcast(packed, 0)
        dist.broadcast(number, 0)
    return _unpack(packed, like), float(number)


def all_kept(kept: dict[int, State], like: State) -> dict[int, State]:
    """What the clients of all ranks keep: whoever trains a client next must have it."""
    if not _together() or not like:
        return kept
    everything: dict[int, State] = {}
    with _watching():
        for source in range(dist.get_world_size()):
            mine = kept if source == dist.get_rank() else {}
            for client in map(int, _broadcast_text(" ".join(map(str, mine)), source).split()):
                packed = _pack(mine.get(client, like))
                dist.broadcast(packed, source)
                everything[client] = _unpack(packed, like)
    return everything


def all_of(clients: list[int]) -> list[int]:
    """The clients that any rank names, in ascending order."""
    if not _together():
        return sorted(clients)
    with _watching():
        said = [
            _broadcast_text(" ".join(map(str, clients)), source)
            for source in range(dist.get_world_size())
        ]
    return sorted(int(client) for text in said for client in text.split())


def agree(text: str) -> str:
    """What rank 0 says."""
    if not _together():
        return text
    with _watching():
        return _broadcast_text(text, 0)


def agree_on(tensors: State) -> State:
    """The named tensors of rank 0."""
    if not _together():
        return tensors
    with _watching():
        about = [[n, str(v.dtype).removeprefix("torch."), *v.shape] for n, v in tensors.items()]
        found: State = {}
        for name, dtype, *shape in json.loads(_broadcast_text(json.dumps(about), 0)):
            here = torch.empty(shape, dtype=getattr(torch, dtype), device=_device())
            found[name] = tensors[name].to(_device()) if dist.get_rank() == 0 else here
            dist.broadcast(found[name], 0)
    return found


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


def _pack(values: State) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values.values()])


def _unpack(packed: Tensor, like: State) -> State:
    parts = packed.split([value.numel() for value in like.values()])
    return {n: p.view(v.shape) for (n, v), p in zip(like.items(), parts, strict=True)}


def _send(parts: list[Part], like: State, to: int) -> None:
    """How many subtrees, where they stand and weigh, and their sums."""
    first = next(iter(like.values()))
    dist.send(torch.tensor([len(parts)], device=first.device), to)
    if parts:
        places = [[p.level, p.index, p.weight, p.loss] for p in parts]
        dist.send(torch.tensor(places, dtype=torch.float64, device=first.device), to)
        dist.send(torch.stack([_pack({n: p.values[n] for n in like}) for p in parts]), to)


def _receive(like: State, source: int) -> list[Part]:
    first = next(iter(like.values()))
    count = torch.zeros(1, dtype=torch.int64, device=first.device)
    dist.recv(count, source)
    if not int(count):
        return []
    places = torch.empty(int(count), 4, dtype=torch.float64, device=first.device)
    sums = first.new_empty(int(count), sum(value.numel() for value in like.values()))
    dist.recv(places, source)
    dist.recv(sums, source)
    return [
        Part(int(level), int(index), _unpack(row, like), weight, loss)
        for (level, index, weight, loss), row in zip(places.tolist(), sums, strict=True)
    ]


def _broadcast_text(text: str, source: int) -> str:
    device = _device()
    letters = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([len(letters)], device=device)
    dist.broadcast(length, source)
    if dist.get_rank() != source:
        letters = torch.empty(int(length), dtype=torch.uint8, device=device)
    if int(length):
        dist.broadcast(letters, source)
    return bytes(letters.tolist()).decode()


@contextmanager
def _watching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        what = str(error).strip().partition("\n")[0]
        raise RankLost(
            f"rank {dist.get_rank()} has lost another process of the run, which has died or has "
            f"been silent for {TIMEOUT.total_seconds():g} s ({what})"
        ) from error
