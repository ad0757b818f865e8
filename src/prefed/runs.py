"""A run on disk: written safely, resumed exactly.

config.toml          the resolved config, enough to run it again
environment.json     versions, machine, git revision
rounds.jsonl         a line per round, appended
checkpoints/         the two newest (checkpoints.py)
model.safetensors    the final weights under the model's own names
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import tomli_w
import torch

from prefed import __version__, checkpoints, distributed
from prefed.config import Config, read_toml
from prefed.engines.auto import Choice
from prefed.errors import CannotWrite, Diverged, Interrupted, PrefedError
from prefed.files import lock, remove_leftovers, to_json, write_whole
from prefed.simulation import Callback, Record, Result, Simulation

SECONDS_BETWEEN = 10.0
"""A checkpoint is due so long after the last one, or later if writing one takes long; after every
round if this is 0."""


def execute(
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    make: Callable[..., Simulation] = Simulation,
) -> Result:
    """Run a config to its end, writing it into `folder` unless that is None.

    resume    go on where the run in `folder` was; without one there, begin
    stop      asked after each round; if it says yes, the run is saved and Interrupted raised
    make      what the run is made with, if not for this machine alone
    """
    directory = None if folder is None else RunDirectory.open(folder, config, resume)
    try:
        simulation = config.make_simulation(make)
        if directory and not directory.is_new:
            directory.restore(simulation)
        _follow_first_rank(simulation)
        simulation.prepare()
        if directory and directory.is_new:
            directory.begin(simulation)
        return _loop(simulation, config, directory, callbacks, stop)
    finally:
        if directory:
            directory.close()


def _follow_first_rank(simulation: Simulation) -> None:
    """In a run on several ranks, all begin where the first one does."""
    if choice := distributed.agree(str(simulation.choice or "")):
        simulation.choice = Choice.parse(choice)
    if lines := distributed.agree("\n".join(to_json(r) for r in simulation.history)):
        tensors = distributed.agree_on(simulation.snapshot())
        if distributed.rank() > 0:
            simulation.restore(tensors, [from_json(line) for line in lines.splitlines()])


def _loop(
    simulation: Simulation,
    config: Config,
    directory: RunDirectory | None,
    callbacks: Sequence[Callback],
    stop: Callable[[], bool],
) -> Result:
    try:
        for callback in callbacks:
            callback.on_start(config.to_dict())
        while simulation.server.round < config.rounds:
            try:
                record = simulation.run_round()
            except Diverged:
                if directory:
                    if simulation.server.round < len(simulation.history):
                        directory.checkpoint(simulation)  # the state before the blow-up
                    directory.append(simulation.history[-1])
                raise
            if directory:
                directory.append(record)
                directory.checkpoint_if_due(simulation)
            for callback in callbacks:
                callback.on_round(record)
            if (
                distributed.agree("stop" if stop() else "")
                and simulation.server.round < config.rounds
            ):
                if directory:
                    directory.checkpoint(simulation)
                raise Interrupted(f"stopped after round {simulation.server.round}")
        result = simulation.result()
        if directory:
            directory.checkpoint(simulation)
            directory.save_model(simulation)
    except (Diverged, Interrupted, CannotWrite) as error:
        for callback in callbacks:
            callback.on_stop(str(error))
        raise
    for callback in callbacks:
        callback.on_end(result)
    return result


class RunDirectory:
    """One run's directory, locked while it is open."""

    def __init__(self, folder: Path, config: Config, is_new: bool) -> None:
        self.folder, self.is_new = folder, is_new
        self.text = tomli_w.dumps(config.to_dict())
        self.fingerprint = hashlib.sha256(self.text.encode()).hexdigest()
        self._lock = lock(folder)
        self._due = 0.0
        self._saved: int | None = None
        """The round of the newest checkpoint that this process has written or read."""
        self._lines: list[str] = []

    @classmethod
    def open(cls, folder: Path, config: Config, resume: bool) -> RunDirectory:
        """The directory if this config may be run there; otherwise an error that says why."""
        existing = folder / "config.toml"
        if existing.exists():
            if differences := diff(read_config(folder), config.to_dict()):
                raise PrefedError(
                    f"{folder}: holds a run of another config; choose another directory\n"
                    + "\n".join(differences)
                )
            if not resume:
                raise PrefedError(
                    f"{folder}: holds this run already; add --resume to go on with it, "
                    f"or choose another directory"
                )
        elif folder.exists() and (not folder.is_dir() or any(_visible(folder))):
            raise PrefedError(f"{folder}: is not empty and holds no run; choose another directory")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, config, is_new=not existing.exists())
        except OSError as error:
            raise CannotWrite(f"{folder}: cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        self._lock.close()

    def begin(self, simulation: Simulation) -> None:
        """The config comes last: a directory that has one also has a checkpoint to begin from."""
        remove_leftovers(self.folder)
        about = json.dumps(environment() | {"engine": str(simulation.choice)}, indent=2) + "\n"
        with self._writing():
            write_whole(self.folder / "environment.json", about)
            write_whole(self.folder / "rounds.jsonl", "")
            self.checkpoint(simulation)
            write_whole(self.folder / "config.toml", self.text)

    def restore(self, simulation: Simulation) -> None:
        remove_leftovers(self.folder)
        saved = checkpoints.load(self.folder / "checkpoints", self.fingerprint)
        self._saved, self._lines = saved.round, saved.rounds.splitlines()
        try:
            simulation.choice = Choice.parse(saved.engine)
            simulation.restore(saved.tensors, [from_json(line) for line in self._lines])
        except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise PrefedError(
                f"{self.folder}: its checkpoint is not of this run: {error}"
            ) from None
        with self._writing():
            write_whole(self.folder / "rounds.jsonl", saved.rounds)  # forget what came after
        self._due = time.monotonic() + SECONDS_BETWEEN

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWrite(
                f"{self.folder}: cannot be written: {error.strerror or error}. What is there is "
                f"intact; make room and go on with --resume"
            ) from error

    def append(self, record: Record) -> None:
        line = to_json(record)
        self._lines.append(line)
        with self._writing(), open(self.folder / "rounds.jsonl", "a") as file:
            file.write(line + "\n")

    def checkpoint_if_due(self, simulation: Simulation) -> None:
        if simulation.save_every_round or time.monotonic() >= self._due:
            self.checkpoint(simulation)

    def checkpoint(self, simulation: Simulation) -> None:
        if simulation.server.round == self._saved:
            return
        start = time.monotonic()
        tensors = {name: value.cpu() for name, value in simulation.snapshot().items()}
        lines = "".join(line + "\n" for line in self._lines)
        engine = str(simulation.choice)
        saved = checkpoints.Checkpoint(simulation.server.round, tensors, lines, engine)
        with self._writing():
            checkpoints.save(self.folder / "checkpoints", self.fingerprint, saved)
        self._saved = saved.round
        now = time.monotonic()
        self._due = now + (max(SECONDS_BETWEEN, 20 * (now - start)) if SECONDS_BETWEEN else 0)

    def save_model(self, simulation: Simulation) -> None:
        """The final weights under the model's own names, buffers and frozen parameters too."""
        tensors = simulation.task.flat.module.state_dict()
        plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        with self._writing():
            write_whole(self.folder / "model.safetensors", safetensors.torch.save(plain))


def read_config(folder: Path) -> dict[str, Any]:
    return read_toml(folder / "config.toml")


def diff(there: dict[str, Any], here: dict[str, Any], path: str = "") -> list[str]:
    """One line for each key whose value differs."""
    lines = []
    for key in sorted({*there, *here}):
        a, b = there.get(key, "(not set)"), here.get(key, "(not set)")
        if isinstance(a, dict) and isinstance(b, dict):
            lines += diff(a, b, f"{path}{key}.")
        elif a != b:
            lines.append(f"  {path}{key}: {a} there, {b} asked for")
    return lines


def _visible(folder: Path) -> list[Path]:
    """What is in a directory, but for what a run leaves that was killed before it began."""
    ours = {"checkpoints", "environment.json", "rounds.jsonl", "logs", "nodes"}
    return [p for p in folder.iterdir() if p.name not in ours and not p.name.startswith(".")]


NUMBERS = ("round", "bytes_up", "bytes_down", "seconds")
"""What every record has."""
OPTIONAL = ("train_loss", "test_loss", "test_accuracy", "adaptive_share", "median_step")
"""Numbers that may be null or missing."""


class NotARecord(ValueError):
    """JSON, but not what is known of a round."""


def from_json(line: str) -> Record:
    """The record that a line holds, whoever wrote the line."""
    record = json.loads(line)
    if not isinstance(record, dict) or any(record.get(key) is None for key in NUMBERS):
        raise NotARecord(line[:80])
    if not all(isinstance(record.get(key), int | float | None) for key in NUMBERS + OPTIONAL):
        raise NotARecord(line[:80])
    return record


def environment() -> dict[str, Any]:
    """What a result may depend on besides its config."""
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "prefed": __version__,
        "git_revision": git.stdout.strip() or None,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
