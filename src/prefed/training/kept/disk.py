"""Kept state in a file: records of one size, of which a client has one.

A record is never written over while a checkpoint may need it. What a client keeps after a round
goes to a free place, and its old place becomes free when no checkpoint names it any more. A
checkpoint holds a table, the place and the checksum of each client's record, and not the records.
So

    a checkpoint costs the table, however large the file is;
    after kill -9 both checkpoints have all that they name: what came later lies elsewhere;
    the file is as large as what clients keep, and what changed since the older checkpoint;
    what is read is known by its checksum, which the checkpoint has, and not the file.

Reads and writes are system calls, not a memory map, in which a full disk would end the process.
"""

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefed.core.errors import CannotWrite, PrefedError, RunFailed
from prefed.core.safe_files import sync
from prefed.rules import State
from prefed.training.kept.record import Bytes, Form, check_sum
from prefed.training.kept.store import CLIENTS, Store, numbers_in, stacked
from prefed.training.trainer import check_fits

FILE = "kept.records"
"""In the directory of a run."""
NONE = -1
"""The place of a client that has not taken part."""
PLACES, SUMS, OLDER, ROUND = (f"kept.store.{n}" for n in ("places", "sums", "older", "round"))
"""In a checkpoint: the place and the checksum of each client's record; places that are not its own
and may be the older checkpoint's; the round of the newest record."""


class OnDisk(Store):
    """The records of a run, in its directory; without one, in a file that has no name and is gone
    when the process ends, however it ends."""

    def __init__(
        self,
        folder: Path | None,
        like: State,
        clients: int,
        device: torch.device,
        saved: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.form, self.device = Form(like), device
        self.path = None if folder is None else folder / FILE
        self.places = np.full(clients, NONE, np.int64)
        self.sums = np.zeros(clients, np.int64)
        self.born = np.zeros(clients, np.int64)
        """The round after which a record was written, or that of the checkpoint it came with."""
        self.end, self.free = 0, list[int]()
        """The first place that was never used, and those before it that nobody needs."""
        self.retired: deque[tuple[int, int]] = deque()
        """Rounds in which a record was replaced, and its place: checkpoints of earlier rounds may
        name it."""
        self.now = 0
        """The round of the newest record."""
        self.begun, self.whole = list[int](), list[int]()
        """Of checkpoints that are being written, and of the two that are there: the round of their
        newest record."""
        self.lost: OSError | None = None
        """Why some of it never came to the disk."""
        self.file = _opened(self.path, anew=saved is None)
        weakref.finalize(self, os.close, self.file)
        if saved is not None:
            self._load(saved)

    @property
    def name(self) -> str:
        return str(self.path or f"a temporary file in {tempfile.gettempdir()}, without a name")

    # Read

    def __len__(self) -> int:
        return int((self.places != NONE).sum())

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.places != NONE).tolist())

    def __contains__(self, client: object) -> bool:
        if not isinstance(client, int | np.integer) or not 0 <= client < len(self.places):
            return False
        return bool(self.places[client] != NONE)

    def __getitem__(self, client: int) -> State:
        if client not in self:
            raise KeyError(client)
        record, place = self.form.new(), int(self.places[client])
        try:
            _read(self.file, record, place * self.form.size)
        except OSError as error:
            raise RunFailed(f"{self.name}: cannot be read: {error.strerror}") from error
        if check_sum(record) != self.sums[client]:
            raise RunFailed(
                f"{self.name}: is damaged: what client {client} keeps is not what was written (at "
                f"byte {place * self.form.size}). Put a sound copy of the file in its place and "
                f"resume, or start the run anew in another directory"
            )
        return self.form.unpack(record, self.device)

    # Write

    def put(self, round: int, kept: Mapping[int, State]) -> None:
        """First all records, then who has them: if the disk is full, nothing has changed."""
        places = self._free_places(len(kept))
        record, sums = self.form.new(), []
        try:
            for place, state in zip(places, kept.values(), strict=True):
                self.form.pack(state, record)
                sums.append(check_sum(record))
                _write(self.file, record, place * self.form.size)
        except OSError as error:
            self.free += places
            raise self._cannot_write(error) from error
        clients = np.fromiter(kept, np.int64, len(kept))
        self._retire(round, clients[self.places[clients] != NONE])
        self.places[clients], self.sums[clients], self.born[clients] = places, sums, round
        self.now = round

    def _cannot_write(self, error: OSError) -> CannotWrite:
        return CannotWrite(
            f"{self.name}: cannot be written: {error.strerror}. The checkpoints and what they need "
            f"are complete; free some disk space and continue with --resume"
        )

    def _flush(self) -> None:
        """To the disk. What the system could not write it may forget, and say so only once."""
        try:
            if self.lost is not None:
                raise self.lost
            os.fsync(self.file)
        except OSError as error:
            self.lost = error
            raise self._cannot_write(error) from error

    def _free_places(self, count: int) -> list[int]:
        more = max(0, count - len(self.free))
        found = [*range(self.end, self.end + more)]
        self.end += more
        rest = len(self.free) - (count - more)
        found, self.free = self.free[rest:] + found, self.free[:rest]
        return found

    def _retire(self, round: int, clients: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        """Records of these clients are replaced. Those that are younger than the newest checkpoint
        are in none."""
        newest = max(self.begun + self.whole, default=NONE)
        named = self.born[clients] <= newest
        self.free += self.places[clients[~named]].tolist()
        self.retired += ((round, place) for place in self.places[clients[named]].tolist())

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        if self.path is None:
            return stacked(self)
        self._flush()
        self.begun.append(self.now)
        clients = np.flatnonzero(self.places != NONE)
        if not len(clients):
            return {}
        return {
            CLIENTS: torch.from_numpy(clients),
            PLACES: torch.from_numpy(self.places[clients]),
            SUMS: torch.from_numpy(self.sums[clients]),
            OLDER: torch.tensor([place for _, place in self.retired], dtype=torch.int64),
            ROUND: torch.tensor(self.now),
        }

    def saved(self, round: int) -> None:
        done = [of for of in self.begun if of <= round]
        self.begun = [of for of in self.begun if of > round]
        self.whole = [*self.whole, *done[-1:]][-2:]
        oldest = min(self.begun + self.whole, default=NONE)
        while self.retired and self.retired[0][0] <= oldest:
            self.free.append(self.retired.popleft()[1])

    def _load(self, saved: Mapping[str, Tensor]) -> None:
        self.end = os.fstat(self.file).st_size // self.form.size
        clients = numbers_in(saved, CLIENTS, len(self.places)).numpy()
        try:
            places = numbers_in(saved, PLACES, self.end).numpy()
            older = numbers_in(saved, OLDER, self.end).numpy()
        except PrefedError as error:
            raise PrefedError(
                f"{self.name}: is damaged or of another run: it has {self.end} records of "
                f"{self.form.size} bytes, not those that the checkpoint names"
            ) from error
        self.places[clients] = places
        self.sums[clients] = check_fits(SUMS, saved, saved[PLACES]).numpy()
        self.now = int(check_fits(ROUND, saved, torch.tensor(0)))
        self.born[clients] = self.now
        self.whole = [NONE, self.now]  # the older one, whichever it is
        self.retired += ((self.now, place) for place in older.tolist())
        unused = np.ones(self.end, bool)
        unused[places], unused[older] = False, False
        self.free = np.flatnonzero(unused).tolist()


def _opened(path: Path | None, anew: bool) -> int:
    if path is None:
        handle, name = tempfile.mkstemp(prefix="prefed-")
        os.unlink(name)
        return handle
    try:
        handle = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if anew else 0), 0o644)
    except FileNotFoundError:
        raise PrefedError(
            f"{path}: is not there, and what clients keep is in it; put it back, or start the run "
            f"anew in another directory"
        ) from None
    except OSError as error:
        raise CannotWrite(f"{path}: cannot be written: {error.strerror}") from error
    sync(path.parent)
    return handle


def _read(file: int, record: Bytes, at: int) -> None:
    """As much as there is: a call may read less than is asked for."""
    left = record.data
    while left and (count := os.preadv(file, [left], at)):
        left, at = left[count:], at + count


def _write(file: int, record: Bytes, at: int) -> None:
    """All of it: a call may write less, before the one that says why."""
    left = record.data
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count
