"""A run on disk: written safely, resumed exactly.

config.toml          the resolved config, enough to run it again
environment.json     versions, machine, git revision
rounds.jsonl         a line per round, appended
checkpoints/         the two newest (checkpoints.py)
model.safetensors    the final weights under the model's own names
best.safetensors     those of the best round so far, if it is to be kept
privacy.jsonl        what a private run has released, a line before each release
"""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy
import tomli_w
import torch
from torch import Tensor

from prefed import __version__
from prefed.core.deprecated import with_new_names
from prefed.core.errors import CannotWrite, PrefedError
from prefed.core.machine import processor, total_memory
from prefed.core.parts import timed
from prefed.core.safe_files import lock, remove_leftovers, to_json, write_whole
from prefed.experiments import checkpoints
from prefed.experiments.config import Config
from prefed.experiments.toml_files import read_toml
from prefed.training import ledger
from prefed.training.observers import Callback
from prefed.training.ranks import make_trainer, speaks
from prefed.training.result import Result, write_model
from prefed.training.run import MakeTrainer, Run
from prefed.training.trainer import Record

SECONDS_BETWEEN = 10.0
"""A checkpoint is due this long after the last one, or later if writing one takes long; after every
round if this is 0."""
MAY_CHANGE = ("  kept_state: ", "  workers: ")
"""How a difference between configs begins that does not make another run: results are the same."""
UP_TO_ROUNDING = ("  engine: ",)
"""The same for results that are the same up to rounding: what has ended is not run again for it."""
RARE = 20
"""Times as long as it took to write one, there is none."""
SHARE = 1 / 8
"""Of the machine's memory: a state that is smaller is copied, and written while the run goes on."""


def execute(
    what: Config | Run,
    folder: Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    make_trainer: MakeTrainer = make_trainer,
    seconds_between: float | None = None,
) -> Result:
    """Carry out a config, or a run that was made in Python, writing it into `folder` unless that is
    None.

    resume           go on where the run in `folder` was; without one there, begin
    stop             asked after each round; if it says yes, the run is saved and Interrupted raised
    make_trainer     where the clients of a config train, if not on this machine
    seconds_between  of checkpoints, if not SECONDS_BETWEEN

    Of several ranks the first alone writes and has callbacks.
    """
    table = what.to_dict() if isinstance(what, Config) else what.config
    with ExitStack() as stack:
        directories = []
        if folder is not None and speaks():
            directory = RunDirectory.open(folder, table, resume, seconds_between)
            directories.append(stack.enter_context(directory))
        run = what.make_run(make_trainer) if isinstance(what, Config) else what
        for directory in directories:
            run.trainer.folder = directory.folder
            directory.restore(run)
            if run.mechanism is not None:
                run.mechanism.ledger.open(directory.folder / ledger.FILE)
        others = callbacks if speaks() else ()
        told = table if isinstance(what, Config) else None
        return run.run([*directories, *others, StopIfAsked(stop)], told)


class StopIfAsked(Callback):
    """Stops a run after the round in which `wanted` becomes true."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.wanted = wanted

    def on_round(self, record: Record) -> None:
        if self.wanted():
            self.run.stop()


class RunDirectory(Callback):
    """One run's directory, locked while it is open: looks on, and writes down what it sees."""

    def __init__(self, folder: Path, text: str, is_new: bool, seconds_between: float) -> None:
        self.folder, self.text, self.is_new = folder, text, is_new
        self.fingerprint = _fingerprint(text)
        self.seconds_between = seconds_between
        self._lock = lock(folder)
        self._writer = checkpoints.Writer()
        self._held: dict[str, Tensor] = {}
        """The state that is being written, in memory of its own, which is used again."""
        self._due = 0.0
        self._saved: int | None = None
        """The round of the newest checkpoint that this process has written or read."""
        self._saved_best = 0
        """The round whose model is in best.safetensors."""
        self._written = 0
        """The lines in rounds.jsonl."""

    @classmethod
    def open(
        cls, folder: Path, table: dict[str, Any], resume: bool, seconds_between: float | None = None
    ) -> "RunDirectory":
        """The directory if what is asked for may be run there; otherwise an error that says why."""
        existing = folder / "config.toml"
        is_new, text = not existing.exists(), tomli_w.dumps(table)
        if not is_new:
            there, asked = read_config(folder), table["rounds"]
            differences, rounds = differing(there, table), there.get("rounds")
            longer = resume and isinstance(rounds, int) and rounds < asked
            if differences and not (longer and len(differences) == 1):
                raise PrefedError(
                    f"{folder}: holds a run of another config; choose another directory\n"
                    + "\n".join(differences + _about_rounds(differences, resume))
                )
            if not resume:
                raise PrefedError(
                    f"{folder}: holds this run already; add --resume (in Python resume=True) to go "
                    f"on with it, or choose another directory"
                )
            text = existing.read_text()  # checkpoints name it: an older version wrote other words
            text = _with_rounds(text, asked)
        elif folder.exists() and not folder.is_dir():
            raise PrefedError(f"{folder}: is a file; choose a directory")
        elif folder.exists() and any(_visible(folder)):
            raise PrefedError(f"{folder}: is not empty and holds no run; choose another directory")
        if seconds_between is None:
            seconds_between = SECONDS_BETWEEN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, text, is_new, seconds_between)
        except OSError as error:
            raise CannotWrite(f"{folder}: cannot be written: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._lock.close()

    def restore(self, run: Run) -> None:
        """Go on from the newest checkpoint, if there is a run here."""
        if self.is_new:
            return
        remove_leftovers(self.folder)
        more = run.settings.rounds

        def before() -> Iterator[str]:
            return (_fingerprint(_with_rounds(self.text, rounds)) for rounds in range(1, more))

        saved = checkpoints.load(self.folder / "checkpoints", self.fingerprint, before)
        self._saved, lines = saved.round, saved.rounds.splitlines()
        self._written = len(lines)
        try:
            run.restore(saved.tensors, [from_json(line) for line in lines], saved.engine)
        except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise PrefedError(
                f"{self.folder}: its checkpoint is not of this run: {error}"
            ) from None
        with self._writing():
            if saved.round < more:  # it is not finished, or not any more
                (self.folder / "model.safetensors").unlink(missing_ok=True)
            if (self.folder / "config.toml").read_text() != self.text:  # it goes on for longer
                write_whole(self.folder / "config.toml", self.text)
            write_whole(self.folder / "rounds.jsonl", saved.rounds)  # forget what came after
        self._due = time.monotonic() + self.seconds_between

    def on_start(self, config: dict[str, Any]) -> None:
        """The config comes last: a directory that has one also has a checkpoint to begin from."""
        if not self.is_new:
            return
        remove_leftovers(self.folder)
        about = json.dumps(environment() | {"engine": self.run.trainer.engine}, indent=2) + "\n"
        with self._writing():
            write_whole(self.folder / "environment.json", about)
            write_whole(self.folder / "rounds.jsonl", "")
            self._checkpoint()
            write_whole(self.folder / "config.toml", self.text)

    def on_round(self, record: Record) -> None:
        self._append(record)
        with self._writing():
            self._writer.check()
        if time.monotonic() >= self._due:
            self._begin_checkpoint()

    def on_end(self, result: Result) -> None:
        """The final weights under the model's own names, and buffers; of what is frozen, a hash."""
        self._checkpoint()
        with self._writing():
            write_model(self.folder / "model.safetensors", self.run.model())

    def on_stop(self, reason: str) -> None:
        """Save the state if it is the one after the rounds that were written down: an error may
        have come in the middle of a round. A second Ctrl-C stops at once."""
        run = self.run
        at_a_round = run.is_whole and run.server.round == self._written
        if at_a_round and not isinstance(run.stopped_by, KeyboardInterrupt):
            self._checkpoint()
        if len(run.history) > self._written and "diverged" in run.history[-1]:
            self._append(run.history[-1])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWrite(
                f"{self.folder}: cannot be written: {error.strerror or error}. The files that are "
                f"there are complete; free some disk space and continue with --resume"
            ) from error

    @timed("records")
    def _append(self, record: Record) -> None:
        line = to_json(record)
        with self._writing(), open(self.folder / "rounds.jsonl", "a") as file:
            file.write(line + "\n")
        self._written += 1

    def _lines(self) -> str:
        """All that was written to rounds.jsonl, if nobody has changed it since."""
        with self._writing():
            lines = (self.folder / "rounds.jsonl").read_text()
        if lines.count("\n") != self._written:
            raise CannotWrite(
                f"{self.folder / 'rounds.jsonl'}: has {lines.count(chr(10))} lines, and "
                f"{self._written} were written: somebody has changed it. The checkpoints are as "
                f"they were; continue with --resume"
            )
        return lines

    @timed("checkpoints")
    def _checkpoint(self) -> None:
        """Save the state as it is now, and the best model if there is a better one."""
        self._begin_checkpoint()
        self._wait()

    def _wait(self) -> None:
        """Until all is written. Who holds what checkpoints name hears of it in this thread."""
        with self._writing():
            self._writer.wait()
        if self._saved is not None:
            self.run.trainer.saved(self._saved)

    @timed("checkpoints")
    def _begin_checkpoint(self) -> None:
        """The same, written by a thread while the run goes on, after one that still is. What is too
        large to be copied is written here."""
        run, start = self.run, time.monotonic()
        self._wait()
        best = run.best.round if run.best is not None else 0
        model = run.model(best=True) if best != self._saved_best else None
        saved, is_small = None, True
        if run.server.round != self._saved:
            lines, state = self._lines(), run.snapshot()
            is_small = sum(value.nbytes for value in state.values()) < SHARE * total_memory()
            tensors = self._copied(state) if is_small else {n: v.cpu() for n, v in state.items()}
            saved = checkpoints.Checkpoint(run.server.round, tensors, lines, run.trainer.engine)

        def write() -> None:
            if saved is not None:
                checkpoints.save(self.folder / "checkpoints", self.fingerprint, saved)
                self._saved = saved.round
                now, between = time.monotonic(), self.seconds_between
                self._due = now + (max(between, RARE * (now - start)) if between else 0)
            if model is not None:
                write_model(self.folder / "best.safetensors", model)
                self._saved_best = best

        if saved is not None or model is not None:
            self._due = math.inf if self.seconds_between else 0.0  # until it is written
            self._writer.start(write)
        if not is_small:
            self._wait()

    def _copied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the next rounds will not change. Memory that was written to before is several times
        faster than new memory."""
        held, self._held = self._held, {}
        for name, value in state.items():
            like = held.get(name)
            if like is None or like.shape != value.shape or like.dtype != value.dtype:
                like = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
            self._held[name] = like.copy_(value)
        return self._held


def read_config(folder: Path) -> dict[str, Any]:
    """The config of the run in a directory, in the words of this version."""
    table = read_toml(folder / "config.toml")
    renamed: dict[str, Any] = with_new_names(table, Config.RENAMED, warn=False)
    return renamed


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _with_rounds(text: str, rounds: int) -> str:
    """The text of a config.toml for that number of rounds: the first such line is the run's."""
    return re.sub(r"^rounds = \d+$", f"rounds = {rounds}", text, count=1, flags=re.MULTILINE)


def _about_rounds(differences: list[str], resume: bool) -> list[str]:
    """More about a run that differs in nothing but a number of rounds."""
    if differences[0].startswith("  rounds: ") and len(differences) == 1:
        return ["with --resume a run can be given more rounds; it cannot be given fewer"]
    falls = [line.strip() for line in differences if ".rounds: " in line]
    if resume and len(falls) == len(differences) - 1 and differences[-1].startswith("  rounds: "):
        parts = [line.removeprefix("algorithm.").partition(" there") for line in falls]
        options = " ".join(f"--set {part[0].replace(': ', '=')}" for part in parts)
        return [f"its step sizes fall over a number of rounds: to keep that add {options}"]
    return []


def differing(there: dict[str, Any], here: dict[str, Any], ended: bool = False) -> list[str]:
    """One line for each key that makes another run of it.

    ended   the run that is there has ended, and is not to go on
    """
    may_change = MAY_CHANGE + UP_TO_ROUNDING if ended else MAY_CHANGE
    return [line for line in diff(there, here) if not line.startswith(may_change)]


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
    ours = {"checkpoints", "environment.json", "rounds.jsonl", "kept.records", "logs", "nodes"}
    return [p for p in folder.iterdir() if p.name not in ours and not p.name.startswith(".")]


NUMBERS = ("round", "bytes_up", "bytes_down", "seconds")
"""What every record has."""
OPTIONAL = (
    "train_loss", "test_loss", "test_accuracy", "adaptive_share", "median_step",
    "client_lr", "server_lr", "update_norm", "drift", "epsilon", "clip",
    "bytes_up_weights", "bytes_up_state", "bytes_down_weights", "bytes_down_state",
    "client_accuracy_mean", "client_accuracy_worst_tenth",
    "client_loss_mean", "client_loss_worst_tenth",
    "staleness_mean", "staleness_max",
    "seconds_virtual", "device_seconds", "wasted_device_seconds", "wasted_bytes_up",
    "wasted_bytes_down", "objective", "objective_gap",
)  # fmt: skip
"""Numbers that may be null or missing."""
LISTS = ("cohort", "dropped", "left_out", "client_accuracies", "client_losses")
"""Lists of numbers that may be missing."""


class NotARecord(ValueError):
    """JSON, but not what is known of a round."""


def from_json(line: str) -> Record:
    """The record that a line holds, whoever wrote the line."""
    return check_record(json.loads(line))


def check_record(record: Any) -> Record:
    if not isinstance(record, dict) or any(record.get(key) is None for key in NUMBERS):
        raise NotARecord(str(record)[:80])
    if not all(isinstance(record.get(key), int | float | None) for key in NUMBERS + OPTIONAL):
        raise NotARecord(str(record)[:80])
    for values in (record[key] for key in LISTS if record.get(key) is not None):
        if not isinstance(values, list) or not all(
            isinstance(v, int | float | None) for v in values
        ):
            raise NotARecord(str(record)[:80])
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
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
