"""Processes that die, and processes that are told to stop: no hang, no orphan, the same bits."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.trials import (
    CannotTry,
    Child,
    checkpoint_every_round,
    command,
    fault,
    resumed,
    scratch,
    start,
    whole,
)

PATIENCE = 60.0
"""Seconds within which a job has to be over."""
RANKS = ("algorithm=scaffold", "local_steps=20")


def adopt_orphans() -> None:
    """Become the parent of every process that loses its own: then none can hide."""
    if os.uname().sysname != "Linux":
        raise CannotTry("needs Linux to find orphans")
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise CannotTry("the kernel does not hand over orphans")


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue
    return found


def workers_of(pid: int) -> list[int]:
    """Of a command that trains in processes: the children of the one that they are copies of."""
    return [worker for nursery in children(pid) for worker in children(nursery)]


def orphans(grace: float = 15.0) -> list[str]:
    """The processes that are still there some seconds after all should be over; they are ended."""
    deadline = time.monotonic() + grace
    while True:
        while True:  # those that have ended and wait to be seen
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return []
            if pid == 0:
                break
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    left = []
    for pid in children(os.getpid()):
        left.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return left


def stopped_at_random(
    times: int,
    rng: random.Random,
    begin: Callable[[], Child],
    length: float,
    after: Callable[[], str] = lambda: "",
    also: tuple[int, ...] = (),
) -> Iterator[str]:
    """SIGINT or SIGTERM, to the process alone or to its group as a terminal does. Exit codes: those
    of a run that is done or interrupted, of a process without a handler yet, and some `also`."""
    for _ in range(times):
        child = begin()
        time.sleep(rng.uniform(0, length))
        number = rng.choice([signal.SIGINT, signal.SIGTERM])
        to_all = rng.random() < 0.5
        try:
            (os.killpg if to_all else os.kill)(child.pid, number)
            code = child.wait(PATIENCE)
            left = orphans()
            if left:
                yield f"{number.name} left behind: {left}"
            elif code not in (0, 130, -number, *also):
                yield f"{number.name}: exit {code}: {child.text()[-400:]}"
            elif "Traceback" in child.text() and code in (0, 130):
                yield f"{number.name}: a traceback: {child.text()[-900:]}"
            else:
                yield after()
        except (ProcessLookupError, PermissionError):
            child.wait(PATIENCE)  # over before the signal came
            yield after()
        except TimeoutError as error:
            orphans()
            yield f"{number.name}: {error}"


@fault("SIGINT or SIGTERM: prefed run, two threads", times=120, quick=2, seconds=70)
def run(times: int, rng: random.Random) -> Iterator[str]:
    """Resumed after that: the same bits."""
    checkpoint_every_round()
    adopt_orphans()
    changes = ("algorithm=scaffold", "workers=2")
    with scratch() as root:
        expected, length = whole(root / "whole", *changes)
        folder = root / "run"

        def after() -> str:
            try:
                return resumed(folder, expected, *changes)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        yield from stopped_at_random(
            times,
            rng,
            lambda: start(command(folder, *changes), root / "log", group=True),
            length,
            after,
        )


COMPARE = ("--algorithms", "fedavg,prefed", "--seeds", "2", "--workers", "2", "--set", "rounds=15",
           "--set", "local_steps=3", "--set", "model.hidden=[16]")  # fmt: skip


@fault("SIGINT or SIGTERM: prefed compare, two processes", times=50, quick=0, seconds=250)
def compare(times: int, rng: random.Random) -> Iterator[str]:
    adopt_orphans()
    with scratch() as root:
        words = ["compare", "digits-noniid", *COMPARE, "--out", str(root / "out")]
        begun = time.monotonic()
        if (child := start(words, root / "log")).wait():
            raise AssertionError(child.text())
        length = time.monotonic() - begun

        def begin() -> Child:
            shutil.rmtree(root / "out", ignore_errors=True)
            return start(words, root / "log", group=True)

        # 1 if the signal reached a worker first, and its death was noticed before the signal was
        yield from stopped_at_random(times, rng, begin, length, also=(1,))


@fault("kill -9 of a worker process of prefed compare", times=8, quick=1, seconds=70)
def job(times: int, rng: random.Random) -> Iterator[str]:
    """The others go on, it ends with a message and exit 1, and the same command goes on."""
    adopt_orphans()
    with scratch() as root:
        for _ in range(times):
            words = ["compare", "digits-noniid", *COMPARE, "--out", str(root / "out")]
            child = start(words, root / "log")
            while not any((root / "out").glob("*/rounds.jsonl")):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
            for pid in workers_of(child.pid)[:1]:
                os.kill(pid, signal.SIGKILL)
            code, text = child.wait(), child.text()
            again = start(words, root / "log")
            if code != 1 or "its worker process died" not in text or "Traceback" in text:
                yield f"exit {code}: {text[-600:]}"
            elif text.count("finished") != 3:
                yield f"the other runs were not finished: {text[-600:]}"
            elif again.wait():
                yield f"it did not go on: {again.text()[-400:]}"
            else:
                left = orphans()
                yield f"left behind: {left}" if left else ""
            shutil.rmtree(root / "out")


@fault("kill -9 of prefed compare itself", times=8, quick=1, seconds=40)
def parent(times: int, rng: random.Random) -> Iterator[str]:
    """Its workers end with it, and do not train on for nobody."""
    adopt_orphans()
    with scratch() as root:
        for _ in range(times):
            words = ["compare", "digits-noniid", *COMPARE, "--out", str(root / "out")]
            words += ["--set", "local_steps=20000"]  # a round that lasts
            child = start(words, root / "log")
            while len(workers_of(child.pid)) < 2:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 4))
            child.kill()
            left = orphans()
            yield f"left behind: {left}" if left else ""
            shutil.rmtree(root / "out", ignore_errors=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ranks(folder: Path, root: Path) -> list[Child]:
    """What torchrun does, without its imports: a process a rank, told where to meet."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [
        start(
            command(folder, *RANKS),
            root / f"log{rank}",
            lambda rank=rank: os.environ.update(  # type: ignore[misc]
                meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ),
        )
        for rank in range(2)
    ]


@fault("kill -9 of a rank", times=60, quick=2, seconds=80)
def rank(times: int, rng: random.Random) -> Iterator[str]:
    """The other ends within a minute with a message; one process alone resumes to the same bits."""
    checkpoint_every_round()
    with scratch() as root:
        expected, length = whole(root / "whole", *RANKS)
        for trial in range(times):
            folder = root / "run"
            ranks = start_ranks(folder, root)
            while not (folder / "config.toml").exists():
                time.sleep(0.005)  # they have met: before that torchrun is there to notice
            time.sleep(rng.uniform(0, 0.8 * length))
            ranks[trial % 2].kill()
            other = ranks[1 - trial % 2]
            begin = time.monotonic()
            try:
                code, text = other.wait(PATIENCE), other.text()
            except TimeoutError as error:
                yield str(error)
                continue
            if code == 0 and trial % 2:  # it had nothing more to hear from the one that died
                yield resumed(folder, expected, *RANKS)
            elif code not in (0, 1) or "Traceback" in text:
                yield f"exit {code} after {time.monotonic() - begin:.0f} s: {text[-600:]}"
            elif code == 1 and "lost another process of the run" not in text:
                yield f"no message: {text[-600:]}"
            else:
                yield resumed(folder, expected, *RANKS)
            shutil.rmtree(folder, ignore_errors=True)


def torchrun(folder: Path, output: Path) -> Child:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-port", str(free_port()), "-m", "prefed", *command(folder, *RANKS)]
    with open(output, "w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    process.returncode = 0  # it is waited for by its number, not by Popen
    return Child(process.pid, output)


@fault("SIGINT or SIGTERM: torchrun, two ranks", times=30, quick=0, seconds=300)
def torchrun_stopped(times: int, rng: random.Random) -> Iterator[str]:
    adopt_orphans()
    with scratch() as root:
        begin = time.monotonic()
        if (child := torchrun(root / "whole", root / "log")).wait(120):
            raise AssertionError(child.text())
        length = time.monotonic() - begin

        def again() -> Child:
            shutil.rmtree(root / "run", ignore_errors=True)
            return torchrun(root / "run", root / "log")

        for problem in stopped_at_random(times, rng, again, length):
            # torchrun itself ends with a traceback of its own, and with the signal as its code
            yield problem if "left behind" in problem or "did not end" in problem else ""


@fault("kill -9 of a rank under torchrun", times=10, quick=0, seconds=120)
def torchrun_rank(times: int, rng: random.Random) -> Iterator[str]:
    adopt_orphans()
    with scratch() as root:
        expected, _ = whole(root / "whole", *RANKS)
        for trial in range(times):
            folder = root / "run"
            child = torchrun(folder, root / "log")
            while len(children(child.pid)) < 2:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 5))
            ranks = sorted(children(child.pid))
            if len(ranks) == 2:
                os.kill(ranks[trial % 2], signal.SIGKILL)
            try:
                code = child.wait(PATIENCE)
            except TimeoutError as error:
                yield str(error)
                continue
            left = orphans()
            if left:
                yield f"left behind: {left}"
            elif code == 0 and not (folder / "model.safetensors").exists():
                yield f"it says all is well: {child.text()[-400:]}"
            else:
                yield resumed(folder, expected, *RANKS)
            shutil.rmtree(folder, ignore_errors=True)
