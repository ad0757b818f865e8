"""What a fault is, and how the command line is run under it.

A fault is a function that tries something so many times and yields one line for each time: empty
if nothing was lost, otherwise what was. It has the process to itself: the runner forks one for each
from a parent that has imported torch and computed nothing, so a run costs no import. What runs in
a child is the command line itself, `prefed.cli.main`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefed import cli
from prefed.experiments import run_directory
from tests.helpers.run_folders import fingerprint, leftovers

Trials = Callable[[int, random.Random], Iterator[str]]


class CannotTry(Exception):
    """This machine does not allow the fault to be made."""


@dataclass(frozen=True)
class Fault:
    title: str
    times: int
    quick: int
    """So many in `make test`."""
    seconds: float
    """What all of it takes, roughly: the long ones begin first."""
    trials: Trials


FAULTS: dict[str, Fault] = {}
"""By a short name: "module.function"."""


def fault(title: str, *, times: int, quick: int, seconds: float = 10) -> Callable[[Trials], Trials]:
    def add(trials: Trials) -> Trials:
        module = trials.__module__.rpartition(".")[2]
        name = f"{module}.{getattr(trials, '__name__', title)}"
        FAULTS[name] = Fault(title, times, quick, seconds, trials)
        return trials

    return add


def room() -> str | None:
    """Where runs are written: a disk in memory where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=room(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


SMALL = ("rounds=6", "local_steps=3", "model.hidden=[16]", "clients_per_round=4", "device=cpu")


def command(folder: Path, *changes: str, resume: bool = True) -> list[str]:
    """`prefed run` of a small run in `folder`; it begins or goes on."""
    words = ["run", "digits-noniid", "--out", str(folder), *(["--resume"] if resume else [])]
    return [*words, *(w for change in (*SMALL, *changes) for w in ("--set", change))]


@dataclass
class Child:
    pid: int
    output: Path
    """What it printed, both streams."""

    def wait(self, seconds: float = 300) -> int:
        """Its exit code; one that does not end is killed, and that is told."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise TimeoutError(f"it did not end within {seconds:g} s: {self.text()}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def start(
    words: list[str], output: Path, before: Callable[[], object] = lambda: None, group: bool = False
) -> Child:
    """Run the command line in a forked child; `before` is called in it first."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, output)
    try:
        if group:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        before()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = call(words)
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def call(words: list[str]) -> int:
    """The command line in this process: its exit code. What escapes it is a traceback to users."""
    sys.argv = ["prefed", *words]
    try:
        cli.main()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def whole(folder: Path, *changes: str) -> tuple[str, float]:
    """The fingerprint of a run that nobody disturbs, and how long it takes."""
    begin = time.monotonic()
    child = start(command(folder, *changes), folder.with_suffix(".log"))
    if child.wait():
        raise AssertionError(f"the undisturbed run failed: {child.text()}")
    return fingerprint(folder), time.monotonic() - begin


def resumed(folder: Path, expected: str, *changes: str) -> str:
    """Resume a run: empty if it ends in the expected bits and leaves no temporary files."""
    child = start(command(folder, *changes), folder.with_suffix(".log"))
    if code := child.wait():
        return f"resuming ended with {code}: {child.text()}"
    if fingerprint(folder) != expected:
        return "the resumed run ended in other bits"
    if left := leftovers(folder):
        return f"left behind: {left}"
    return ""


def checkpoint_every_round() -> None:
    run_directory.SECONDS_BETWEEN = 0.0
