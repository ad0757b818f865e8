"""A run on several processes or machines: `torchrun --nproc-per-node N -m prefed run CONFIG`.

Every rank has the whole global state, draws the same cohort, and trains its share of it. The mean
is a fixed tree over the cohort (mean.py): a rank adds up the subtrees it owns and hands them to a
lower rank, which goes on adding, up to rank 0; from there the mean comes back to all, and every
rank takes the same server step. So the bits do not depend on the number of ranks. Wide models have
no tree (means/in_turn.py): there blocks are dealt out in turn, and rank 0 adds up all of them.

The first rank evaluates, writes and prints for all; the others begin where it does and stop with
it.

Ranks of one machine listen on loopback alone, and the first one where MASTER_ADDR says. torchrun
itself listens on all interfaces, for which prefed.core.private_network is there.
"""

import errno
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, RankLost
from prefed.data import FederatedData
from prefed.rules import State
from prefed.training.asynchronous_trainer import AsynchronousTrainer
from prefed.training.engines.auto import Choice
from prefed.training.engines.workers import Clients
from prefed.training.kept import Store
from prefed.training.kept.disk import PLACES
from prefed.training.kept.estimate import Where
from prefed.training.local_trainer import SQUARE, LocalTrainer, spread
from prefed.training.mean import Mean, Part, Rows
from prefed.training.means.in_turn import Elsewhere, InTurn, is_wide
from prefed.training.messages import averaged
from prefed.training.server_state import Server
from prefed.training.settings import Settings
from prefed.training.task import Task
from prefed.training.trainer import Arrived

if TYPE_CHECKING:
    from prefed.training.run import Run

T = TypeVar("T")

ALONE = "is for runs in one process; set workers in place of ranks (torchrun)"
"""What each rank has to itself."""

TIMEOUT = timedelta(minutes=10)
"""A rank that is silent for longer is taken for dead."""


@contextmanager
def joined() -> Iterator[bool]:
    """Join the process group that torchrun has set up, if there is one. True on the rank that
    speaks for the run, and without a group."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_joined():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if _all_here():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        if (store := _own_store()) is None:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT
            )
    yield speaks()
    if is_joined():
        dist.destroy_process_group()


def _all_here() -> bool:
    """Whether all ranks are on this machine, as torchrun or the address they meet at says."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    address = _meeting_address()
    return address is not None and ipaddress.ip_address(address).is_loopback


def _meeting_address() -> str | None:
    """MASTER_ADDR, if it is an address and not a name, which may mean another one elsewhere."""
    told = os.environ.get("MASTER_ADDR", "")
    try:
        return str(ipaddress.ip_address("127.0.0.1" if told == "localhost" else told))
    except ValueError:
        return None


def _own_store() -> Any:
    """Where ranks meet, listening on MASTER_ADDR alone: torch's own listens on all interfaces. None
    for torch's own: if torchrun holds it, or if the address is not one of this machine's."""
    address, port = _meeting_address(), int(os.environ.get("MASTER_PORT", "0"))
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if by_torchrun or address is None or not port or "RANK" not in os.environ:
        return None  # torch says what is missing
    handle = None
    if os.environ["RANK"] == "0":
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.create_server((address, port), family=family) as server:
                handle = server.detach()  # torch closes it
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=handle is not None, timeout=TIMEOUT, multi_tenant=True,
        wait_for_workers=False, master_listen_fd=handle,
    )  # fmt: skip


def is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def speaks() -> bool:
    """This process evaluates, writes and prints for the run."""
    return not is_joined() or dist.get_rank() == 0


def make_trainer(
    algorithm: Algorithm, task: Task, data: FederatedData, settings: Settings
) -> LocalTrainer:
    """On all ranks of the group that this process belongs to, or else in this process."""
    alone = LocalTrainer if settings.asynchronous is None else AsynchronousTrainer
    return (RankTrainer if is_joined() else alone)(algorithm, task, data, settings)


class RankTrainer(LocalTrainer):
    """Each rank trains its share of the cohort."""

    @property
    def leads(self) -> bool:  # type: ignore[override]
        return speaks()

    def prepare(self, run: "Run") -> None:
        """All ranks begin where the first one does: after a resume it alone has read the disk."""
        if self.mechanism is not None and self.mechanism.secret:
            raise PrefedError(
                "privacy.secret_noise: all ranks draw the same noise, from the seed; run it in one "
                "process, or on Flower"
            )
        if engine := text_of_first(self.engine):
            self.choice = Choice.parse(engine)
        if history := json.loads(text_of_first(json.dumps(run.history))):
            tensors = tensors_of_first(run.snapshot())
            if not self.leads:
                run.restore(tensors, history, self.engine)
        super().prepare(run)

    def load_state(self, saved: Mapping[str, Tensor], engine: str) -> None:
        if PLACES in saved:
            raise PrefedError(f"what clients keep is on disk, which {ALONE}")
        super().load_state(saved, engine)

    def _settled(self, more: int, where: Where) -> Store:
        """In memory: every rank has all of it."""
        if where == "disk":
            raise PrefedError(f'kept_state: "disk" {ALONE}')
        return super()._settled(more, "memory") if self.leads else self.kept

    def _choose(self, server: Server, cohort: list[int]) -> Choice:
        chosen = str(super()._choose(server, cohort)) if self.leads else ""
        return Choice.parse(text_of_first(chosen))

    def _collect(self, server: Server, clients: list[int]) -> Mean:
        """Clients of a wide model are added up in turn, by the first rank."""
        mean, me, ranks = super()._collect(server, clients), dist.get_rank(), dist.get_world_size()
        if not isinstance(mean, InTurn):
            return mean
        like = self._like(server)
        if me > 0:
            return Elsewhere(partial(_send_rows, like))
        assert self.workers is not None, "prepare() comes first"
        blocks = self.workers.blocks(self.algorithm, clients)
        others = {
            first: partial(_receive_rows, like, len(its), number % ranks)
            for number, (first, its) in enumerate(blocks)
            if number % ranks
        }
        return InTurn(self.memory, others)

    def _like(self, server: Server) -> State:
        """Names and shapes of what is averaged."""
        like = averaged(self.algorithm, server)
        if self.mechanism is not None:
            like = self.mechanism.like(server)
        return like | {SQUARE: server.weights.new_zeros(1)}

    def _share(self, blocks: Sequence[Clients]) -> Sequence[Clients]:
        me, ranks = dist.get_rank(), dist.get_world_size()
        if is_wide(self.task.flat.shared.size):
            return blocks[me::ranks]
        return share(blocks, me, ranks)

    def _together(
        self, server: Server, mean: Mean, clients: int, kept: dict[int, State]
    ) -> Arrived:
        values, loss = mean_of_all(mean, self._like(server))
        record = spread(self.algorithm, values, self.means.weights.rule.is_plain)
        return Arrived(values, loss, clients, kept_of_all(kept, self.first_kept), record)

    def _result(self, mean: Mean, like: State) -> tuple[State, float]:
        return mean_of_all(mean, like)

    def _not_finite(self, server: Server, clients: list[int]) -> list[int]:
        found = json.dumps([int(client) for client in super()._not_finite(server, clients)])
        with _watching():
            said = [_broadcast_text(found, source) for source in range(dist.get_world_size())]
        return sorted(client for text in said for client in json.loads(text))

    def agree(self, text: str) -> str:
        return text_of_first(text)


def share(items: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """A rank's items: neighbours, and no rank is idle while a higher one has work."""
    each, more = divmod(len(items), ranks)
    first = rank * each + min(rank, more)
    return items[first : first + each + (rank < more)]


def mean_of_all(collected: Mean, like: State) -> tuple[State, float]:
    """The mean over the clients of all ranks, with the bits of a single process. `like` has the
    names and shapes of the values, for ranks without a client."""
    me = dist.get_rank()
    with _watching():
        for tree, own in collected.collected(like):
            _to_first(tree, own)
        values, loss = collected.result() if me == 0 else (like, 0.0)
        packed = _pack({name: values[name] for name in like})
        number = torch.tensor([loss], dtype=torch.float64, device=packed.device)
        dist.broadcast(packed, 0)
        dist.broadcast(number, 0)
    return _unpack(packed, like), float(number)


def _to_first(tree: Mean, like: State) -> None:
    """Hand the subtrees down to lower ranks, which go on adding, until the first has all."""
    ranks, me, distance = dist.get_world_size(), dist.get_rank(), 1
    while distance < ranks:
        if me % (2 * distance) == distance:
            _send(tree.parts(), like, me - distance)
        elif me % (2 * distance) == 0 and me + distance < ranks:
            for part in _receive(like, me + distance):
                tree.add_part(part)
        distance *= 2


def kept_of_all(kept: dict[int, State], like: State) -> dict[int, State]:
    """What the clients of all ranks keep: whoever trains a client next must have it."""
    if not like:
        return kept
    everything: dict[int, State] = {}
    with _watching():
        for source in range(dist.get_world_size()):
            mine = kept if source == dist.get_rank() else {}
            for client in map(int, _broadcast_text(" ".join(map(str, mine)), source).split()):
                held = mine.get(client, like)
                packed = _pack({name: held[name] for name in like})
                dist.broadcast(packed, source)
                everything[client] = _unpack(packed, like)
    return everything


def text_of_first(text: str) -> str:
    """What the first rank says."""
    with _watching():
        return _broadcast_text(text, 0)


def tensors_of_first(tensors: State) -> State:
    """The named tensors of the first rank."""
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


def _pack(values: State) -> Tensor:
    """Their bytes, one after another: they may differ in type."""
    return torch.cat([value.reshape(-1).view(torch.uint8) for value in values.values()])


def _unpack(packed: Tensor, like: State) -> State:
    parts = packed.split([value.nbytes for value in like.values()])
    pairs = zip(like.items(), parts, strict=True)
    return {n: p.clone().view(v.dtype).view(v.shape) for (n, v), p in pairs}


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
    length = sum(value.nbytes for value in like.values())
    sums = torch.empty(int(count), length, dtype=torch.uint8, device=first.device)
    dist.recv(places, source)
    dist.recv(sums, source)
    return [
        Part(int(level), int(index), _unpack(row, like), weight, loss)
        for (level, index, weight, loss), row in zip(places.tolist(), sums, strict=True)
    ]


def _send_rows(like: State, rows: Rows) -> None:
    """A block of clients, to the first rank."""
    numbers = rows.weights, rows.losses
    with _watching():
        for name in like:
            dist.send(rows.values[name].contiguous(), 0)
        dist.send(torch.tensor(numbers, dtype=torch.float64, device=_device()), 0)


def _receive_rows(like: State, count: int, source: int, first: int) -> Rows:
    values = {n: v.new_empty(count, *v.shape) for n, v in like.items()}
    numbers = torch.empty(2, count, dtype=torch.float64, device=_device())
    with _watching():
        for value in values.values():
            dist.recv(value, source)
        dist.recv(numbers, source)
    return Rows(first, values, *numbers.tolist())


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
