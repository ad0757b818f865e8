"""What this machine has, and how much of it a run uses."""

import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

LARGE = 1_000_000_000
"""Floating-point operations of a pass over a batch from which on torch may divide each of its
operations among threads. Below, threads that wait for each other cost more than they save, and
beside a busy process many times more."""


def total_memory(device: torch.device | None = None) -> int:
    """The memory of a device, or of this machine, in bytes. All of it, not what is free: what is
    decided by it must not change from run to run."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(
    device: torch.device | None = None,
    proc: Path = Path("/proc"),
    root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """The bytes that this process may still take: of a GPU, or of this machine, its control groups
    (containers) and the limit of the process (ulimit -v)."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min([total_memory(), *_left(proc), *_left_in_groups(proc, root)]))


def _left(proc: Path) -> Iterator[int]:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        yield from (1024 * int(s.split()[1]) for s in lines if s.startswith("MemAvailable:"))
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int((proc / "self/statm").read_text().split()[0])
            yield limit - pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return  # another system has other files


def _left_in_groups(proc: Path, root: Path) -> Iterator[int]:
    """What each control group around this process, of version 2, still allows."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    here = next((root / line[2].strip("/") for line in lines if line[:2] == ["0", ""]), root)
    for folder in (here, *here.parents):
        try:
            most, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
            yield most - used
        except (OSError, ValueError):
            pass  # "max" is no limit, and the outermost group has no file
        if folder == root:
            return


def processor(about: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, as far as the system tells."""
    with suppress(OSError):
        for line in about.read_text(errors="replace").splitlines():
            key, _, name = line.partition(":")
            if key.strip() == "model name":
                return " ".join(name.split())
    return platform.processor() or platform.machine()


def halves_vectors(about: Path = Path("/proc/cpuinfo")) -> bool:
    """The processor has operations on 512 bits, and computes them as two on 256: AMD's Zen 4."""
    with suppress(OSError):
        lines = about.read_text(errors="replace").splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (s.partition(":") for s in lines)}
        return (fields.get("vendor_id"), fields.get("cpu family")) == ("AuthenticAMD", "25")
    return False


def cores(group: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: those of its affinity, and not more than the quota of
    its control groups (containers) allows."""
    affinity = getattr(os, "sched_getaffinity", None)
    found = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([found, *(int(quota) for quota in _quotas(group, root))]))


def _quotas(group: Path, root: Path) -> Iterator[float]:
    """Cores that each control group around this process allows, of version 2 and of version 1."""
    try:
        lines = [line.split(":", 2) for line in group.read_text().splitlines()]
    except OSError:
        return
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds and "cpu" not in kinds.split(","):
            continue
        inside = root / "cpu" if kinds else root
        here = inside / path.strip("/")
        for folder in (here, *here.parents):
            try:
                if kinds:
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    quota, period = ((folder / name).read_text().strip() for name in names)
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):
                pass  # the root has no limit, or another system has other files
            if folder == inside:
                break


def usable_threads() -> int:
    """The cores a run may use: as many as torch does (OMP_NUM_THREADS), if they are there."""
    return min(torch.get_num_threads(), cores())


def threads_for(operations: float) -> int:
    """Threads for each operation of a pass over a batch that takes this many in all."""
    return usable_threads() if operations >= LARGE else 1


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with this many threads; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
