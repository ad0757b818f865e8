"""Runs under way, read again and again: each time only what was appended to their files."""

from dataclasses import dataclass
from pathlib import Path

from prefed.core.errors import PrefedError
from prefed.experiments.record_lines import NotARecord, from_json
from prefed.experiments.stored_runs import ARCHIVE, StoredRun, load_archive, load_run


@dataclass
class _Tail:
    """A run, and how far its rounds.jsonl has been read: to the end of the last whole line."""

    run: StoredRun
    file: int = -1
    """Its inode: a run that is resumed puts another file in its place."""
    position: int = 0
    status: str = ""

    def read(self) -> bool:
        """Whether there is anything new. A file that has not grown is not opened."""
        before = self.file, self.position, self.status
        path = self.run.folder / "rounds.jsonl"
        try:
            about = path.stat()
            if about.st_ino != self.file or about.st_size < self.position:
                self.run.history, self.file, self.position = [], about.st_ino, 0
            if about.st_size > self.position:
                self._append(path)
        except FileNotFoundError:
            pass
        except (NotARecord, ValueError, RecursionError):
            number = len(self.run.history) + 1
            raise PrefedError(f"{path}:{number}: not a record of a round") from None
        if self.status not in ("finished", "diverged") or before[:2] != (self.file, self.position):
            self.status = self.run.status
        return before != (self.file, self.position, self.status)

    def _append(self, path: Path) -> None:
        with open(path, "rb") as file:
            file.seek(self.position)
            new = file.read()
        for line in new[: new.rfind(b"\n") + 1].splitlines(keepends=True):
            self.run.history.append(from_json(line.decode()))
            self.position += len(line)


class Following:
    """The runs in a directory and below it. They, and it, need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[Path, _Tail] = {}
        self._archives: dict[Path, tuple[int, list[StoredRun]]] = {}

    def read(self) -> bool:
        """Whether anything is new since the last time: a run, a round, how a run ended."""
        changed = False
        archives = {path: path.stat().st_mtime_ns for path in self.folder.rglob(ARCHIVE)}
        for path, time in archives.items():
            if self._archives.get(path, (0, []))[0] != time:
                self._archives[path] = time, list(load_archive(path.parent).values())
                changed = True
        archived = {run.folder for _, runs in self._archives.values() for run in runs}
        there = {path.parent for path in self.folder.rglob("config.toml")} - archived
        if there != self._tails.keys():
            changed = True
            gone = self._tails.keys() - there
            self._tails = {f: tail for f, tail in self._tails.items() if f not in gone}
            for folder in there - self._tails.keys():
                self._tails[folder] = _Tail(load_run(folder, with_records=False))
        news = [tail.read() for tail in self._tails.values()]
        return changed or any(news)

    def runs(self) -> list[StoredRun]:
        found = [run for _, runs in self._archives.values() for run in runs]
        found += [tail.run for tail in self._tails.values()]
        return sorted(found, key=lambda run: run.folder)
