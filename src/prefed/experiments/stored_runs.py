"""Reading runs back from disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core.errors import PrefedError
from prefed.core.safe_files import is_locked, read_whole
from prefed.experiments.run_directory import NotARecord, from_json, read_config
from prefed.training.trainer import Record

if TYPE_CHECKING:
    import pandas


@dataclass
class StoredRun:
    """A run as its directory tells it."""

    folder: Path
    config: dict[str, Any]
    history: list[Record] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> str:
        return str(self.config["algorithm"]["name"])

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def status(self) -> str:
        """finished, diverged, running, or interrupted (and can be resumed)."""
        if self.history and _diverged(self.history[-1]):
            return "diverged"
        if (self.folder / "model.safetensors").exists():
            return "finished"
        return "running" if is_locked(self.folder) else "interrupted"

    def final_accuracy(self) -> float | None:
        """Of a run that came to its end; None for others and without labels."""
        return self.final("test_accuracy")

    def final(self, key: str) -> float | None:
        """A number of the last round, of a run that came to its end."""
        return self.history[-1].get(key) if self.status == "finished" else None

    def reached(self, target: float) -> Record | None:
        """The first round with that test accuracy."""
        hits = (r for r in self.history if (r.get("test_accuracy") or 0) >= target)
        return next(hits, None)

    def total(self, key: str, rounds: int | None = None) -> float:
        """The sum of a number over the rounds, or over the first so many."""
        return float(sum(record[key] for record in self.history[:rounds]))


def _diverged(last: Record) -> bool:
    """A round that was skipped has no loss either."""
    return "diverged" in last or (last.get("train_loss") is None and not last.get("skipped"))


def load_run(folder: Path) -> StoredRun:
    run = StoredRun(folder, read_config(folder))
    path = folder / "rounds.jsonl"
    algorithm = run.config.get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("name"), str):
        raise PrefedError(f"{folder / 'config.toml'}: names no algorithm")
    if not isinstance(run.config.get("rounds"), int) or not isinstance(
        run.config.get("seed", 0), int
    ):
        raise PrefedError(f"{folder / 'config.toml'}: seed, rounds: should be whole numbers")
    for number, line in enumerate(_lines(path), 1):
        try:
            run.history.append(from_json(line))
        except NotARecord:
            raise PrefedError(f"{path}:{number}: not a record of a round") from None
        except (ValueError, RecursionError):
            break  # the last line of a run that was killed while writing it
    try:
        about = json.loads(read_whole(folder / "environment.json"))
    except (OSError, ValueError, RecursionError):
        about = {}
    run.environment = about if isinstance(about, dict) else {}
    return run


def _lines(path: Path) -> list[str]:
    """Those of rounds.jsonl; a byte that is no text makes its line unreadable, and no other."""
    try:
        return read_whole(path).decode(errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error.strerror}") from None


def load_runs(*folders: str | Path) -> list[StoredRun]:
    """All runs in these directories and below them, in the order of their paths."""
    runs = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise PrefedError(f"{folder}: no such directory")
        configs = sorted({*folder.glob("config.toml"), *folder.rglob("config.toml")})
        runs += [load_run(path.parent) for path in configs]
    return runs


def to_pandas(*folders: str | Path) -> pandas.DataFrame:
    """One row per round of every run, with its directory, algorithm, seed and algorithm options."""
    try:
        import pandas
    except ImportError:
        raise PrefedError("to_pandas needs pandas: pip install pandas") from None
    rows = []
    for run in load_runs(*folders):
        options = {f"algorithm.{k}": v for k, v in run.config["algorithm"].items() if k != "name"}
        about = {"run": str(run.folder), "algorithm": run.algorithm, "seed": run.seed}
        rows += [{**about, "status": run.status, **options, **record} for record in run.history]
    return pandas.DataFrame(rows)
