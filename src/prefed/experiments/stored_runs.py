"""Reading runs back from disk: a directory for each run, or many runs in one archive.

An archive, runs.jsonl.xz, has a line for each run that has ended, in the order of their names:
{"run": "FedAvg-seed0", "config": {"rounds": 60, ...}, "records": [{"round": 1, ...}, ...]}
and between config and records, if it is known, "environment": {"processor": ..., "cores": ...}.
"""

import json
import lzma
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core.deprecated import with_new_names
from prefed.core.errors import PrefedError
from prefed.core.safe_files import is_locked, read_whole, write_whole
from prefed.experiments.config import Config
from prefed.experiments.record_lines import NotARecord, check_record, from_json
from prefed.experiments.same_config import read_config
from prefed.training.result import frame
from prefed.training.trainer import Record

if TYPE_CHECKING:
    import pandas

ARCHIVE = "runs.jsonl.xz"
MACHINE = ("processor", "cores", "torch", "prefed")
"""What an archive has of a run's environment."""
BOMB = 1000
"""An archive that grows more than this many times is refused. Records shrink to a twelfth."""


@dataclass
class StoredRun:
    """The config and the records of a run."""

    folder: Path
    config: dict[str, Any]
    history: list[Record] = field(default_factory=list)
    """A record for each round."""
    environment: dict[str, Any] = field(default_factory=dict)
    archived: bool = False
    """Read from an archive: `folder` is where it was run, and need not exist."""

    @property
    def algorithm(self) -> str:
        return str(self.config["algorithm"]["name"])

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def split(self) -> str:
        """What `test_loss` and `test_accuracy` are of: "test", or "validation" if samples were set
        aside for that."""
        data = self.config.get("data")
        return "validation" if isinstance(data, dict) and data.get("validation") else "test"

    @property
    def status(self) -> str:
        """finished, diverged, running, or interrupted (and can be resumed)."""
        if self.history and _diverged(self.history[-1]):
            return "diverged"
        if self.archived or (self.folder / "model.safetensors").exists():
            return "finished"
        return "running" if is_locked(self.folder) else "interrupted"

    @property
    def has_ended(self) -> bool:
        """Whether it diverged or all its rounds are recorded. Its model may be missing."""
        if not self.history:
            return False
        last = self.history[-1]
        return bool(_diverged(last) or self.ended or last["round"] == self.config["rounds"])

    @property
    def ended(self) -> str:
        """Why it ended before its last round; empty if it did not."""
        return str(self.history[-1].get("ended", "")) if self.history else ""

    @property
    def epsilon(self) -> float | None:
        """What a private run has spent so far, as its records say; None of one that is not."""
        spent = [r["epsilon"] for r in self.history if r.get("epsilon") is not None]
        return max(spent, default=None)

    def final(self, key: str) -> float | None:
        """The value of `key` in the last round of a finished run, otherwise None."""
        return self.history[-1].get(key) if self.status == "finished" else None

    def reached(self, target: float) -> Record | None:
        """The record of the first round with at least this test accuracy, a fraction."""
        hits = (r for r in self.history if (r.get("test_accuracy") or 0) >= target)
        return next(hits, None)

    def total(self, key: str, rounds: int | None = None) -> float:
        """The sum of `key` over all rounds, or over the first `rounds`."""
        return float(sum(record[key] for record in self.history[:rounds]))

    @property
    def timed(self) -> bool:
        """Whether it has a virtual clock."""
        return bool(self.history) and all(
            r.get("seconds_virtual") is not None for r in self.history
        )


def _diverged(last: Record) -> bool:
    """Whether a run with this last record diverged; a skipped round has no loss either, nor has
    one of a private run."""
    may_have_none = last.get("skipped") or "epsilon" in last
    return "diverged" in last or (last.get("train_loss") is None and not may_have_none)


def load_run(folder: Path, with_records: bool = True) -> StoredRun:
    """The run in a directory."""
    config = _checked(read_config(folder), str(folder / "config.toml"))
    run = StoredRun(folder, config)
    path = folder / "rounds.jsonl"
    lines = _lines(path) if with_records else []
    for number, line in enumerate(lines, 1):
        try:
            run.history.append(from_json(line))
        except NotARecord:
            raise PrefedError(f"{path}:{number}: not a record of a round") from None
        except (ValueError, RecursionError):
            if number < len(lines):
                raise PrefedError(f"{path}:{number}: not a record of a round") from None
            # else the last line of a run that was killed while writing it
    try:
        about = json.loads(read_whole(folder / "environment.json"))
    except (OSError, ValueError, RecursionError):
        about = {}
    run.environment = about if isinstance(about, dict) else {}
    return run


def _checked(config: dict[str, Any], where: str) -> dict[str, Any]:
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("name"), str):
        raise PrefedError(f"{where}: names no algorithm")
    if not isinstance(config.get("rounds"), int) or not isinstance(config.get("seed", 0), int):
        raise PrefedError(f"{where}: seed, rounds: should be whole numbers")
    return config


def _lines(path: Path) -> list[str]:
    """The lines of rounds.jsonl. Bytes that are not UTF-8 make only their own line unreadable."""
    try:
        return read_whole(path).decode(errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error.strerror}") from None


def load_archive(folder: Path) -> dict[str, StoredRun]:
    """The runs in the archive of a directory by name; none if it has no archive."""
    path = folder / ARCHIVE
    runs: dict[str, StoredRun] = {}
    for number, line in enumerate(_unpack(path).splitlines() if path.exists() else (), 1):
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
            name, config = entry["run"], dict(entry["config"])
            records = [check_record(record) for record in entry["records"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise PrefedError(f"{where}: not a run with its config and records") from None
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise PrefedError(f"{where}: run: should be the name of a directory")
        config = _checked(with_new_names(config, Config.RENAMED, warn=False), where)
        about = entry.get("environment")
        machine = about if isinstance(about, dict) else {}
        run = StoredRun(folder / name, config, records, machine, archived=True)
        if name in runs or not run.has_ended:
            raise PrefedError(f"{where}: {name}: is there twice, or has not ended")
        runs[name] = run
    return runs


def _unpack(path: Path) -> bytes:
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 27)
    try:
        packed = read_whole(path)
        text = unpacker.decompress(packed, BOMB * len(packed))
    except (OSError, lzma.LZMAError) as error:
        raise PrefedError(f"{path}: cannot be read: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        raise PrefedError(f"{path}: is not one whole xz file, or grows more than {BOMB} times")
    return text


def write_archive(folder: Path, runs: Iterable[StoredRun]) -> None:
    """Replace the archive of a directory. The same runs always make the same bytes."""
    entries = [_entry(run) for run in runs]
    lines = [json.dumps(e) + "\n" for e in sorted(entries, key=lambda e: str(e["run"]))]
    write_whole(folder / ARCHIVE, lzma.compress("".join(lines).encode()))


def _entry(run: StoredRun) -> dict[str, Any]:
    """A run as its line has it. What it was computed on is left out where it is not known."""
    machine = {key: run.environment[key] for key in MACHINE if key in run.environment}
    about = {"environment": machine} if machine else {}
    return {"run": run.folder.name, "config": run.config, **about, "records": run.history}


def load_runs(*folders: str | Path) -> list[StoredRun]:
    """All runs in these directories and below them, archived or not, ordered by their paths. One
    that lies in several of them counts once; one that cannot be read is left out, with a
    warning."""
    runs: dict[Path, StoredRun] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            what = (
                "is a file; give the directory of runs" if folder.exists() else "no such directory"
            )
            raise PrefedError(f"{folder}: {what}")
        found: dict[Path, StoredRun] = {}
        for path in folder.rglob(ARCHIVE):
            found |= {run.folder: run for run in load_archive(path.parent).values()}
        for path in {p.parent for p in folder.rglob("config.toml")} - found.keys():
            try:
                found[path] = load_run(path)
            except PrefedError as error:
                if path == folder:  # which was asked for by name
                    raise
                warnings.warn(f"left out: {error}", stacklevel=2)
        for path in sorted(found):
            runs.setdefault(path.resolve(), found[path])
    return [*runs.values()]


def to_pandas(*folders: str | Path) -> "pandas.DataFrame":
    """One row per round of every run, with its directory, algorithm, seed and algorithm options."""
    rows = []
    for run in load_runs(*folders):
        options = {f"algorithm.{k}": v for k, v in run.config["algorithm"].items() if k != "name"}
        about = {"run": str(run.folder), "algorithm": run.algorithm, "seed": run.seed}
        rows += [{**about, "status": run.status, **options, **record} for record in run.history]
    return frame(rows)
