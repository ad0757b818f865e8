"""kill -9 of asynchronous runs: at random moments, and at random events.

The final SHA-256 of the weights and of rounds.jsonl (times aside) must be those of a run that
nobody interrupted: the heap, the versions that clients began with and the updates under way come
back from the checkpoint.
"""

from __future__ import annotations

import heapq
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefed.training import asynchronous_trainer
from tests.faults.kill import at_random_moments, die
from tests.faults.trials import (
    checkpoint_every_round,
    command,
    fault,
    resumed,
    scratch,
    start,
)
from tests.helpers.run_folders import fingerprint

PHONES = ("rounds=12", "devices=phone", "devices.vanish=0.1")
BUFFER = (*PHONES, "asynchronous.buffer=3", "asynchronous.concurrency=8")
EACH = (*PHONES, "asynchronous.buffer=1", "asynchronous.concurrency=6", "asynchronous.mix=models")
VARIANTS = (
    ("algorithm=prefed", "engine=vectorised", *BUFFER),
    ("algorithm=scaffold", "engine=sequential", "workers=2", *BUFFER),
    ("algorithm=scaffold", "engine=vectorised", *EACH),
    ("algorithm=prefedlite", "engine=vectorised", "workers=2", *BUFFER),
)


@fault("kill -9 at a random moment: an asynchronous run", times=100, quick=1, seconds=120)
def moments(times: int, rng: random.Random) -> Iterator[str]:
    shares = [len(range(n, times, len(VARIANTS))) for n in range(len(VARIANTS))]
    for share, changes in zip(shares, VARIANTS, strict=True):
        if share:
            yield from at_random_moments(share, rng, changes)


def die_at_event(number: int | None, note: Path) -> Callable[[], None]:
    """For a child: to die at the event of that number; or to count them into a file. An event is
    an arrival, or a block of clients that is trained."""

    def patch() -> None:
        count = 0

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    die()
                if number is None:
                    note.write_text(str(count))
                return real(*args, **options)

            return call

        heapq.heappop = counted(heapq.heappop)
        owner: Any = asynchronous_trainer
        owner.receive_block = counted(owner.receive_block)

    return patch


@fault("kill -9 at a random event of an asynchronous run", times=200, quick=3, seconds=300)
def at_events(times: int, rng: random.Random) -> Iterator[str]:
    """Every third time the run that resumes is killed as well, if it gets so far."""
    checkpoint_every_round()
    with scratch() as root:
        expected: dict[tuple[str, ...], tuple[str, int]] = {}
        for trial in range(times):
            changes, note = VARIANTS[trial % len(VARIANTS)], root / "events"
            if changes not in expected:
                folder = root / f"whole-{trial}"
                child = start(command(folder, *changes), root / "log", die_at_event(None, note))
                if child.wait():
                    raise AssertionError(child.text())
                expected[changes] = fingerprint(folder), int(note.read_text())
            bits, last = expected[changes]
            folder = root / str(trial)
            for may_end in (False, True) if trial % 3 == 0 else (False,):
                number = rng.randint(1, last)
                child = start(command(folder, *changes), root / "log", die_at_event(number, note))
                code = child.wait()
                if code != -signal.SIGKILL and not (may_end and code == 0):
                    yield f"it was not killed at event {number}: {code}, {child.text()}"
            yield resumed(folder, bits, *changes)
            shutil.rmtree(folder)
