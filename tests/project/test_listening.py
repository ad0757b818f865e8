"""Nothing of ours listens beyond loopback, unless it is told to: docs/security.md has the table."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prefed.core import private_network
from tests.helpers import ROOT, made_tables
from tests.helpers.listening import BETWEEN, Listener, allowed, listeners, of_command
from tests.project.listening import ALONE, COMMANDS, PYTHON, SHORT, TABLE, cells

pytestmark = pytest.mark.process
QUICK = ("`prefed run`", "`prefed watch`", "`torchrun` whose ranks meet in a file")
BEYOND = "plain `torchrun`"
"""The one command that listens for others, and is not ours: torchrun itself."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if not allowed():
        pytest.skip("this machine allows no network namespaces")


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in COMMANDS]
)
def test_what_listens(command: str, tmp_path: Path) -> None:
    found = COMMANDS[command](tmp_path)
    assert cells(command, found) == [row for row in made_tables.rows(TABLE) if row[0] == command]
    beyond = {one.program for one in found if one.reached_from == "the network"}
    assert beyond == ({"torchrun"} if command == BEYOND else set())


def test_the_table_has_every_command_and_no_other() -> None:
    assert list(dict.fromkeys(row[0] for row in made_tables.rows(TABLE))) == list(COMMANDS)


LISTEN = """
import socket, subprocess, sys
held = [socket.create_server((a, 0), family=f) for a, f in (
    ("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("192.0.2.1", socket.AF_INET),
    ("::1", socket.AF_INET6), ("::", socket.AF_INET6))]
print(subprocess.check_output(["ss", "-ltnH"], text=True), flush=True)
print("Ctrl-C", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(shutil.which("ss") is None, reason="there is no ss")
def test_the_reading_of_proc_is_what_ss_shows() -> None:
    command = [*BETWEEN, PYTHON, "-c", LISTEN]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "Ctrl-C\n"))
        read = listeners({process.pid})
        process.communicate("")
    shown = [line.split()[3].rpartition(":")[0].strip("[]") for line in lines if line.strip()]
    shown = ["*" if address in ("0.0.0.0", "::") else address for address in shown]
    assert sorted({one.address for one in read}) == sorted(set(shown))
    assert {one.address: one.reached_from for one in read} == {
        "127.0.0.1": "this machine", "::1": "this machine",
        "*": "the network", "192.0.2.1": "the network",
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_listen_on_the_address_they_are_told(tmp_path: Path) -> None:
    """With another address than loopback, and with ranks that are not all here: a process a rank,
    as on two machines."""
    script = (
        "import time, torch.distributed as dist; from prefed.training import ranks\n"
        "with ranks.joined():\n"
        "    dist.barrier(); time.sleep(1); dist.barrier()\n"
    )
    both = 'RANK=0 "$@" & RANK=1 exec "$@"'
    found = of_command(
        ["sh", "-c", both, "sh", PYTHON, "-c", script], tmp_path,
        environment={
            "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29400", "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "v0", "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    assert found == {Listener("prefed", "192.0.2.1", "the network")}


INTERFACES = "import socket; print(*(name for _, name in socket.if_nameindex()), flush=True)"
FORBIDDEN = ("unshare", "-rn", "sh", "-c",
             "echo 0 > /proc/sys/user/max_net_namespaces && "
             "ip link set lo up && ip link add v0 type veth peer name v1 && ip link set v0 up && "
             'exec "$@"', "sh")  # fmt: skip
"""As on a system that lets nobody have a network of their own."""


@pytest.mark.parametrize("rights", ["all", "without CAP_SYS_ADMIN"])
def test_a_network_of_its_own(rights: str, tmp_path: Path) -> None:
    less = [] if rights == "all" else ["setpriv", "--bounding-set=-sys_admin"]
    if less and (shutil.which("setpriv") is None or os.geteuid() != 0):
        less = []  # a user has no such right to give up
    file = tmp_path / "file"
    script = f"{INTERFACES}; open({str(file)!r}, 'w').close()"
    names = subprocess.check_output([*less, *ALONE, PYTHON, "-c", script], text=True).split()
    assert names[0] == "lo"
    assert "lo" in [name for _, name in socket.if_nameindex()]
    assert file.stat().st_uid == os.geteuid()
    assert not private_network.is_alone()
    checked = "from prefed.core import private_network as n; print(n.is_alone(), n.inside('x'))"
    said = subprocess.check_output([*less, *ALONE, PYTHON, "-c", checked], text=True)
    assert said.split() == ["True", "['x']"]  # no second one within


def test_the_command_ends_as_it_would_without(tmp_path: Path) -> None:
    assert subprocess.run([*ALONE, PYTHON, "-c", "raise SystemExit(7)"]).returncode == 7
    done = subprocess.run([*ALONE, "no-such"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: no-such: No such file or directory\n")


def test_without_a_network_of_its_own_ray_is_not_started(tmp_path: Path) -> None:
    words = ["deploy", *SHORT, "--simulate", "2", "--out", "run"]
    command = [*FORBIDDEN, PYTHON, "-m", "prefed", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert "error: this system allows no network of one's own" in said
    assert "listens on all interfaces; use --local, or insist with --open-network" in said
    assert not (tmp_path / "run").exists()
    peers = [sys.executable, str(ROOT / "bench/peers/run.py"), "--folder", "peers"]
    done = subprocess.run(
        [*FORBIDDEN, *peers], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "insist with --open-network" in done.stderr
    assert not (tmp_path / "peers").exists()


@pytest.mark.slow
def test_the_user_may_insist(tmp_path: Path) -> None:
    """In a network that reaches nobody: Ray then listens on all of its interfaces."""
    words = ["deploy", *SHORT, "--simulate", "2", "--out", "run", "--open-network"]
    found = of_command([PYTHON, "-m", "prefed", *words], tmp_path)
    assert "the network" in {one.reached_from for one in found if one.program == "Ray"}
