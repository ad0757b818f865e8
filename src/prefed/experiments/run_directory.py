"""A run on disk: written safely, resumed exactly.

config.toml          the resolved config, enough to run it again
environment.json     versions, machine, git revision
rounds.jsonl         a line per round, appended
checkpoints/         the two newest (checkpoints.py)
model.safetensors    the final weights under the model's own names
best.safetensors     those of the best round so far, if it is to be kept
privacy.jsonl        what a private run has released, a line before each release
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import tomli_w
import torch
from torch import Tensor

from prefed.core.errors import CannotWrite, PrefedError
from prefed.core.machine import total_memory
from prefed.core.parts import timed
from prefed.core.safe_files import lock, remove_leftovers, to_json, write_whole
from prefed.experiments import checkpoints
from prefed.experiments.config import Config, MadeData
from prefed.experiments.environment import environment
from prefed.experiments.record_lines import from_json
from prefed.experiments.same_config import (
    about_rounds,
    differing,
    fingerprint,
    read_config,
    with_rounds,
)
from prefed.training import ledger
from prefed.training.observers import Callback
from prefed.training.ranks import make_trainer, speaks
from prefed.training.result import Result, write_model
from prefed.training.run import MakeTrainer, Run
from prefed.training.trainer import Record

SECONDS_BETWEEN = 10.0
"""A checkpoint is due this long after the last one, or later if writing one takes long; after every
round if this is 0."""
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
    data: MadeData | None = None,
) -> Result:
    """Carry out a config, or a run that was made in Python, writing it into `folder` unless that is
    None.

    resume           go on where the run in `folder` was; without one there, begin
    stop             asked after each round; if it says yes, the run is saved and Interrupted raised
    make_trainer     where the clients of a config train, if not on this machine
    seconds_between  of checkpoints, if not SECONDS_BETWEEN
    data             of a config, if it has been made already

    Of several ranks the first alone writes and has callbacks.
    """
    table = what.to_dict() if isinstance(what, Config) else what.config
    with ExitStack() as stack:
        directories = []
        if folder is not None and speaks():
            directory = RunDirectory.open(folder, table, resume, seconds_between)
            directories.append(stack.enter_context(directory))
        run = what.make_run(make_trainer, data=data) if isinstance(what, Config) else what
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
        self.fingerprint = fingerprint(text)
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
                    + "\n".join(differences + about_rounds(differences, resume))
                )
            if not resume:
                raise PrefedError(
                    f"{folder}: holds this run already; add --resume (in Python resume=True) to go "
                    f"on with it, or choose another directory"
                )
            text = existing.read_text()  # checkpoints name it: an older version wrote other words
            text = with_rounds(text, asked)
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
            return (fingerprint(with_rounds(self.text, rounds)) for rounds in range(1, more))

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


def _visible(folder: Path) -> list[Path]:
    """What is in a directory, but for what a run leaves that was killed before it began."""
    ours = {"checkpoints", "environment.json", "rounds.jsonl", "kept.records", "logs", "nodes"}
    return [p for p in folder.iterdir() if p.name not in ours and not p.name.startswith(".")]
