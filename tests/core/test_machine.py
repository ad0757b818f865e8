"""The cores that a process may use, and the threads that torch computes with."""

import os
import resource
from pathlib import Path

import pytest
import torch

from prefed.core import machine


def group(tmp_path: Path, line: str, **files: str) -> int:
    """The cores of a process whose control group is told by this line and these files."""
    (tmp_path / "cgroup").write_text(line)
    for name, text in files.items():
        path = tmp_path / "fs" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return machine.cores(tmp_path / "cgroup", tmp_path / "fs")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_affinity_without_control_groups(tmp_path: Path) -> None:
    assert machine.cores(tmp_path / "none", tmp_path) == 8


def test_quota_of_version_2_also_of_a_group_around_it(tmp_path: Path) -> None:
    limits = {"a__cpu_DOT_max": "350000 100000\n", "a__b__cpu_DOT_max": "max 100000\n"}
    assert group(tmp_path, "0::/a/b\n", **limits) == 3


def test_quota_of_version_1(tmp_path: Path) -> None:
    limits = {
        "cpu__a__cpu_DOT_cfs_quota_us": "50000\n",
        "cpu__a__cpu_DOT_cfs_period_us": "100000\n",
        "cpu__cpu_DOT_cfs_quota_us": "-1\n",
        "cpu__cpu_DOT_cfs_period_us": "100000\n",
    }
    assert group(tmp_path, "5:memory:/a\n4:cpu,cpuacct:/a\n", **limits) == 1, "half a core is one"


def test_files_of_another_form_are_passed_over(tmp_path: Path) -> None:
    assert group(tmp_path, "0::/a\nnonsense\n", a__cpu_DOT_max="0 0 0\n") == 8


def test_threads_go_by_size_and_by_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert machine.threads_for(machine.LARGE) == 8
    assert machine.threads_for(machine.LARGE - 1) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert machine.threads_for(machine.LARGE) == 2, "OMP_NUM_THREADS, or what the caller has set"


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), machine.torch_threads(3):
        assert torch.get_num_threads() == 3
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    with machine.torch_threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    7000 kB\n"}, 7000 << 10),
        ({"proc/meminfo": "MemAvailable: 7000 kB\n", "proc/self/cgroup": "0::/a/b\n",
          "fs/a/b/memory.max": "max\n", "fs/a/b/memory.current": "5\n",
          "fs/a/memory.max": "3000\n", "fs/a/memory.current": "1000\n"}, 2000),
        ({"proc/self/cgroup": "0::/\n", "fs/memory.max": "3000", "fs/memory.current": "4000"}, 0),
        ({"proc/self/cgroup": "4:cpu:/a\n"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_memory_that_is_free(files: dict[str, str], free: int | None, tmp_path: Path) -> None:
    """Of the machine, of a group around the process, in a container; None: all of it."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = machine.free_memory(None, tmp_path / "proc", tmp_path / "fs")
    assert found == (machine.total_memory() if free is None else free)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_that_a_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (used + (1 << 20), 1 << 41))
    assert machine.free_memory() <= 2 << 20


@pytest.mark.parametrize(
    ("vendor", "family", "halves"),
    [("AuthenticAMD", 25, True), ("AuthenticAMD", 26, False), ("GenuineIntel", 6, False)],
)
def test_processors_that_halve_wide_vectors(
    tmp_path: Path, vendor: str, family: int, halves: bool
) -> None:
    about = tmp_path / "cpuinfo"
    about.write_text(
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t: 17\n"
    )
    assert machine.halves_vectors(about) is halves
    assert not machine.halves_vectors(tmp_path / "none")
