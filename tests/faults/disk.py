"""A disk that is full, or cannot be written to: a clear message, exit 1, and nothing lost.

The disk is a small tmpfs in a mount namespace of our own, which needs no rights where the kernel
lets users have namespaces. Its size goes up page by page, so that it is full at every place a run
writes to; then there is room, and the run goes on to the same bits.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.faults.trials import (
    CannotTry,
    checkpoint_every_round,
    command,
    fault,
    resumed,
    scratch,
    start,
    whole,
)
from tests.helpers.run_folders import fingerprint

ALGORITHM = "algorithm=scaffold"
ON_DISK = (ALGORITHM, "kept_state=disk", "clients_per_round=12")
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18


def libc(name: str, *arguments: bytes | int | None) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise CannotTry(f"no file systems of our own here ({name}: {os.strerror(number)})")


def own_mounts() -> None:
    """From here on this process and its children mount what they like, and nobody else sees it."""
    if not hasattr(os, "geteuid") or os.uname().sysname != "Linux":
        raise CannotTry("needs Linux")
    libc("unshare", CLONE_NEWNS | (CLONE_NEWUSER if os.geteuid() else 0))
    libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def mount(folder: Path, size: int, flags: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    libc("mount", b"none", bytes(folder), b"tmpfs", flags, b"size=%d" % size)


def remount(folder: Path, size: int, read_only: bool = False) -> None:
    mount(folder, size, MS_REMOUNT | (MS_RDONLY if read_only else 0))


def ended_well(code: int, text: str, reason: str) -> str:
    if "Traceback" in text:
        return f"a traceback: {text}"
    if code not in (1, 2) or "error: " not in text or reason not in text:
        return f"exit {code}, {text[-300:]!r}"
    return ""


@fault("disk full", times=90, quick=5, seconds=60)
def full(times: int, rng: random.Random) -> Iterator[str]:
    return filled(times, ALGORITHM)


@fault("disk full: kept state on disk", times=90, quick=5, seconds=60)
def full_of_kept_state(times: int, rng: random.Random) -> Iterator[str]:
    return filled(times, *ON_DISK)


def filled(times: int, *changes: str) -> Iterator[str]:
    own_mounts()
    checkpoint_every_round()
    with scratch() as root:
        expected, _ = whole(root / "whole", *changes)
        used = sum(p.stat().st_size for p in (root / "whole").rglob("*") if p.is_file())
        page, disk = resource.getpagesize(), root / "disk"
        most = 2 * used // page
        hit = 0
        for trial in range(times):
            pages = 2 + trial * most // times
            mount(disk, pages * page)
            child = start(command(disk / "run", *changes), root / "log")
            if (code := child.wait()) == 0:
                yield "" if fingerprint(disk / "run") == expected else "other bits"
            else:
                hit += 1
                told = "would not fit on the disk" if code == 2 else "No space left on device"
                problem = ended_well(code, child.text(), told)
                remount(disk, 64 << 20)
                yield problem or resumed(disk / "run", expected, *changes)
            libc("umount2", bytes(disk), 0)
        if hit < times // 3:
            yield f"the disk was full only {hit} times: this test tests too little"


@fault("read-only directory", times=2, quick=2, seconds=5)
def read_only(times: int, rng: random.Random) -> Iterator[str]:
    """A new run there, and one that stood there before."""
    own_mounts()
    checkpoint_every_round()
    with scratch() as root:
        expected, _ = whole(root / "whole", ALGORITHM)
        disk = root / "disk"
        mount(disk, 64 << 20)
        shutil.copytree(root / "whole", disk / "run")
        (disk / "run" / "model.safetensors").unlink()
        remount(disk, 64 << 20, read_only=True)
        for name in ("new", "run"):
            child = start(command(disk / name, ALGORITHM), root / "log")
            yield ended_well(child.wait(), child.text(), "Read-only file system")
        remount(disk, 64 << 20)
        yield resumed(disk / "run", expected, ALGORITHM)
        remount(disk, 64 << 20, read_only=True)
        report = ["report", str(disk / "run"), "-o", str(disk / "report.html")]
        child = start(report, root / "log")
        yield ended_well(child.wait(), child.text(), "Read-only file system")


@fault("files may not grow", times=40, quick=4, seconds=25)
def limited(times: int, rng: random.Random) -> Iterator[str]:
    """A limit on the size of files, which a quota or a shell may set: EFBIG in the place of ENOSPC.
    Needs no rights at all."""
    checkpoint_every_round()
    with scratch() as root:
        expected, _ = whole(root / "whole", ALGORITHM)
        largest = max(p.stat().st_size for p in (root / "whole").rglob("*") if p.is_file())
        for trial in range(times):
            limit = 1 + trial * (largest - 2) // times
            folder = root / str(trial)

            def forbid(limit: int = limit) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

            # Its own output goes into a pipe of no size: the limit is for files alone.
            child = start(command(folder, ALGORITHM), Path("/dev/null"), forbid)
            code = child.wait()
            if code != 1:
                yield f"exit {code} with a limit of {limit} bytes"
            else:
                yield resumed(folder, expected, ALGORITHM)
            shutil.rmtree(folder)
