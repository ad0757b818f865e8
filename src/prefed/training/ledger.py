"""The ledger of a private run: every release is written down before its noise is drawn.

A line of privacy.jsonl is on the disk, whatever happens next, when the noised mean comes into
being. So a process that is killed at any point has counted what it may have shown, or more.

Draws that follow from the seed make a resumed run release in a round what it released there before:
that round counts once. With noise from the system every line counts.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed.core.errors import CannotWrite, PrefedError
from prefed.core.safe_files import read_whole, sync, write_whole

FILE = "privacy.jsonl"


@dataclass(frozen=True)
class Release:
    round: int
    """Counted from 1."""
    noise_multiplier: float
    clients: tuple[int, ...] | None = None
    """Whose budget it is, where each client has one of its own; None: that of all."""


@dataclass
class Ledger:
    """secret   releases of a round that is done again differ, so that each of them counts"""

    secret: bool = False
    releases: list[Release] = field(default_factory=list)
    path: Path | None = None

    def open(self, path: Path) -> None:
        """Go on with the ledger in a file, if it is there, and write to it from now on."""
        self.path = path
        try:
            text = read_whole(path).decode(errors="replace") if path.exists() else ""
        except OSError as error:
            raise PrefedError(f"{path}: cannot be read: {error.strerror or error}") from None
        lines = text.split("\n")
        torn = lines.pop()  # what a killed process had begun to write
        found = [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        if torn:  # its release may have followed, so it counts, for every client
            last = found[-1] if found else Release(0, 0.0)
            found.append(Release(last.round + 1, last.noise_multiplier))
            write_whole(path, "".join(map(_line, found)))
        self.releases = found + [r for r in self.releases if not self._has(r.round, found)]

    def _has(self, round: int, releases: Iterable[Release]) -> bool:
        return any(release.round == round for release in releases)

    def spend(self, release: Release) -> None:
        """Write it down. Comes before the noise is drawn."""
        if not self.secret and self._has(release.round, self.releases):
            return
        self._write(_line(release))
        self.releases.append(release)

    def count(self, upto: int) -> int:
        """The releases that count after this round: of the client that has most, if each has a
        budget of its own."""
        counted = self.releases
        if not self.secret:
            by_round = {r.round: r for r in self.releases if r.round <= upto}
            counted = [*by_round.values()]
        own = Counter(client for r in counted if r.clients is not None for client in r.clients)
        return sum(r.clients is None for r in counted) + max(own.values(), default=0)

    def _write(self, text: str) -> None:
        if self.path is None:
            return
        try:
            is_new = not self.path.exists()
            with open(self.path, "a") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self.path.parent)
        except OSError as error:
            raise CannotWrite(
                f"{self.path}: cannot be written: {error.strerror or error}. Nothing was released "
                f"without it; free some disk space and continue with --resume"
            ) from error


def _line(release: Release) -> str:
    table: dict[str, Any] = {"round": release.round, "noise_multiplier": release.noise_multiplier}
    if release.clients is not None:
        table["clients"] = release.clients
    return json.dumps(table) + "\n"


def _read(line: str, where: str) -> Release:
    try:
        table = json.loads(line)
        round, noise, clients = table["round"], table["noise_multiplier"], table.get("clients")
        whole = [round, *(clients or ())]
        if not all(type(n) is int and n >= 0 for n in whole) or type(noise) not in (int, float):
            raise ValueError(line)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise PrefedError(
            f"{where}: is no line of a privacy ledger, so what was spent is not known; the run "
            f"cannot go on"
        ) from None
    return Release(round, float(noise), None if clients is None else tuple(clients))
