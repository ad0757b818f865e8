"""kill -9: at random moments, at every boundary between rounds, and before every step of writing.

The final SHA-256 of the weights and of rounds.jsonl (times aside) must be those of a run that
nobody interrupted, and no temporary file may be left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefed.training.run import Simulation
from tests.faults.trials import (
    checkpoint_every_round,
    command,
    fault,
    resumed,
    scratch,
    start,
    whole,
)
from tests.helpers.run_folders import fingerprint

SERVER = ("algorithm=fedadam",)
SHARED = ("algorithm=prefed",)
KEPT = ("algorithm=scaffold",)
THREADS = ("algorithm=scaffold", "workers=2")
DISK = ("algorithm=scaffold", "kept_state=disk", "clients_per_round=12")
VARIANTS = (SERVER, SHARED, KEPT, THREADS, DISK)
"""With state on the server, shared state, and state that clients keep; on two threads; in a file
in which places are used again."""


def at_random_moments(times: int, rng: random.Random, changes: tuple[str, ...]) -> Iterator[str]:
    """Every third time the run that resumes is killed as well."""
    checkpoint_every_round()
    with scratch() as root:
        expected, length = whole(root / "whole", *changes)
        for trial in range(times):
            folder = root / str(trial)
            for _ in range(2 if trial % 3 == 0 else 1):
                child = start(command(folder, *changes), root / "log")
                time.sleep(rng.uniform(0, length))
                child.kill()
            yield resumed(folder, expected, *changes)
            shutil.rmtree(folder)


@fault("kill -9 at a random moment: server state", times=250, quick=1, seconds=120)
def server_state(times: int, rng: random.Random) -> Iterator[str]:
    return at_random_moments(times, rng, SERVER)


@fault("kill -9 at a random moment: shared state", times=250, quick=1, seconds=120)
def shared_state(times: int, rng: random.Random) -> Iterator[str]:
    return at_random_moments(times, rng, SHARED)


@fault("kill -9 at a random moment: kept state", times=250, quick=2, seconds=120)
def kept_state(times: int, rng: random.Random) -> Iterator[str]:
    return at_random_moments(times, rng, KEPT)


@fault("kill -9 at a random moment: two threads", times=250, quick=1, seconds=120)
def two_threads(times: int, rng: random.Random) -> Iterator[str]:
    return at_random_moments(times, rng, THREADS)


@fault("kill -9 at a random moment: kept state on disk", times=250, quick=2, seconds=120)
def kept_on_disk(times: int, rng: random.Random) -> Iterator[str]:
    return at_random_moments(times, rng, DISK)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_round(round: int, written: bool) -> Callable[[], None]:
    """For a child: to die when that round is computed, or when it is also on the disk."""

    def patch() -> None:
        real = Simulation.run_round

        def run_round(self: Simulation) -> Any:
            if written and self.server.round == round:
                die()
            record = real(self)
            if not written and self.server.round == round:
                die()
            return record

        Simulation.run_round = run_round  # type: ignore[method-assign]

    return patch


@fault("kill -9 at every boundary between rounds", times=55, quick=2, seconds=30)
def boundaries(times: int, rng: random.Random) -> Iterator[str]:
    """Before and after the round is written; then one run that is killed at all of them."""
    checkpoint_every_round()
    with scratch() as root:
        places = [
            (changes, round, written)
            for changes in VARIANTS
            for round in range(1, 6)
            for written in (False, True)
        ]
        rng.shuffle(places)
        expected = {changes: whole(root / "-".join(changes), *changes)[0] for changes, *_ in places}
        for changes, round, written in places[:times]:
            folder = root / "run"
            child = start(command(folder, *changes), root / "log", die_in_round(round, written))
            if (code := child.wait()) != -signal.SIGKILL:
                yield f"it was not killed in round {round}: {code}, {child.text()}"
            else:
                yield resumed(folder, expected[changes], *changes)
            shutil.rmtree(folder)
        for changes in VARIANTS[: max(0, times - len(places))]:
            folder = root / "often"
            for round in range(1, 6):
                for written in (False, True):
                    start(
                        command(folder, *changes), root / "log", die_in_round(round, written)
                    ).wait()
            yield resumed(folder, expected[changes], *changes)
            shutil.rmtree(folder)


STEPS = ((os, "fsync"), (os, "replace"), (os, "rename"), (shutil, "rmtree"), (Path, "mkdir"),
         (os, "pwrite"))  # fmt: skip
"""Everything that a run does to its directory passes through one of these."""


def die_at_step(step: int | None, note: Path) -> Callable[[], None]:
    """For a child: to die before so many steps of writing; or to count them into a file."""

    def patch() -> None:
        count = 0

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == step:
                    die()
                if step is None:
                    note.write_text(str(count))
                return real(*args, **options)

            return call

        for owner, name in STEPS:
            setattr(owner, name, counted(getattr(owner, name)))

    return patch


@fault("kill -9 before each step of writing", times=450, quick=6, seconds=170)
def writing(times: int, rng: random.Random) -> Iterator[str]:
    checkpoint_every_round()
    with scratch() as root:
        expected, places = {}, []
        for changes in (SERVER, SHARED, KEPT, DISK):
            note = root / "steps"
            folder = root / "-".join(changes)
            child = start(command(folder, *changes), root / "log", die_at_step(None, note))
            if child.wait():
                raise AssertionError(child.text())
            expected[changes] = fingerprint(folder)
            places += [(changes, step) for step in range(1, int(note.read_text()) + 1)]
        rng.shuffle(places)
        for changes, step in places[:times]:
            folder = root / "run"
            child = start(command(folder, *changes), root / "log", die_at_step(step, root / "x"))
            if (code := child.wait()) != -signal.SIGKILL:
                yield f"it was not killed at step {step}: {code}, {child.text()}"
            else:
                yield resumed(folder, expected[changes], *changes)
            shutil.rmtree(folder, ignore_errors=True)
