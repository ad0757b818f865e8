"""Checkpoints: the whole state of a run between two rounds, whole on disk or not there at all.

    checkpoints/000012/state.safetensors    server state and what clients keep
    checkpoints/000012/rounds.jsonl         the history up to here
    checkpoints/000012/manifest.json        which run it is of, SHA-256 of every file and of itself

A checkpoint is written under another name and renamed when all of it is on the disk. The two
newest are kept, so that damage to one leaves the other.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.safe_files import read_whole, sync, write_whole
from prefed.core.tensor_files import write_tensors

KEPT = 2
FILES = ("state.safetensors", "rounds.jsonl")


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and an older one is used."""


@dataclass(frozen=True)
class Checkpoint:
    round: int
    tensors: dict[str, Tensor]
    rounds: str
    """The lines of rounds.jsonl up to here."""
    engine: str
    """What computes the run: another engine would round otherwise."""


def save(folder: Path, run: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint of the run with that fingerprint, and drop all but the two newest."""
    final = folder / f"{checkpoint.round:06d}"
    draft = folder / f".draft-{checkpoint.round:06d}"
    _new(draft).mkdir(parents=True)
    state, rounds = FILES
    manifest = {
        "run": run,
        "round": checkpoint.round,
        "engine": checkpoint.engine,
        "sha256": {
            state: write_tensors(draft / state, checkpoint.tensors),
            rounds: _sha256(checkpoint.rounds.encode()),
        },
    }
    write_whole(draft / rounds, checkpoint.rounds)
    manifest["manifest_sha256"] = _sha256(_canonical(manifest))
    write_whole(draft / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    if final.exists():  # a damaged one: never half of it under its name
        os.rename(final, _new(folder / f".draft-old-{final.name}"))
    os.rename(draft, final)
    sync(folder)
    shutil.rmtree(folder / f".draft-old-{final.name}", ignore_errors=True)
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)


class Writer:
    """A thread that writes, one thing at a time, while the run goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "prefed-checkpoints")
        self._last: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin, after what was begun before."""
        self.wait()
        self._last = self._thread.submit(write)

    def check(self) -> None:
        """Raise what went wrong, if it has."""
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Until all is written; raise what went wrong."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        self._thread.shutdown()


def load(folder: Path, run: str, before: Callable[[], Iterable[str]] = tuple) -> Checkpoint:
    """The newest sound checkpoint of the run. One warning for each newer one that is damaged.

    before  the fingerprints that the run may have had before it was given more rounds
    """
    for draft in folder.glob(".draft-*"):
        shutil.rmtree(draft, ignore_errors=True)
    problems = []
    for path in reversed(_complete(folder)):
        try:
            checkpoint = _read(path, run, before)
        except _Damaged as error:
            problems.append(f"{path.name}: {error}")
            continue
        for problem in problems:
            warnings.warn(
                f"checkpoint {problem}; going on from round {checkpoint.round}",
                CheckpointWarning,
                stacklevel=2,
            )
        return checkpoint
    reason = "; ".join(problems) or "there is none"
    raise PrefedError(
        f"{folder}: no checkpoint can be used ({reason}). The run cannot be resumed; "
        f"start it anew in another directory"
    )


class _Damaged(Exception):
    pass


def _read(path: Path, run: str, before: Callable[[], Iterable[str]]) -> Checkpoint:
    try:
        manifest: dict[str, Any] = json.loads(read_whole(path / "manifest.json"))
        stated = manifest.pop("manifest_sha256")
        if stated != _sha256(_canonical(manifest)):
            raise _Damaged("its manifest is damaged")
        if manifest["run"] != run and manifest["run"] not in before():
            raise _Damaged("it belongs to another run")
        if manifest["round"] != int(path.name):
            raise _Damaged(f"it is the one of round {manifest['round']}")
        contents = {name: read_whole(path / name) for name in FILES}
        for name, content in contents.items():
            if _sha256(content) != manifest["sha256"][name]:
                raise _Damaged(f"{name} is damaged")
        tensors = safetensors.torch.load(contents["state.safetensors"])
        lines = contents["rounds.jsonl"].decode()
        if lines.count("\n") != manifest["round"]:
            raise _Damaged("rounds.jsonl is of another round")
        return Checkpoint(manifest["round"], tensors, lines, str(manifest["engine"]))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as e:
        raise _Damaged(f"it cannot be read ({type(e).__name__}: {e})") from None


def _new(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    return path


def _complete(folder: Path) -> list[Path]:
    """By number: after round 999,999 names grow longer."""
    found = (p for p in folder.glob("[0-9]*") if p.name.isdecimal() and p.is_dir())
    return sorted(found, key=lambda p: int(p.name))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()
