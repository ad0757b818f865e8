"""Who listens where: the sockets of a command and of all that it starts, as `ss -ltnp` shows them.

They are read from /proc, which needs no tool and sees every network namespace;
tests/project/test_listening.py compares that with ss.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"
EVERYWHERE = ("0.0.0.0", "::")
BETWEEN = ("unshare", "-rn", "sh", "-c",
           "ip link set lo up && ip link add v0 type veth peer name v1 && "
           "ip addr add 192.0.2.1/24 dev v0 && ip link set v0 up && ip link set v1 up && "
           "ip route add default via 192.0.2.2 && "
           'exec "$@"', "sh")  # fmt: skip
"""A network that has an interface beside loopback and a way out, as machines have, and reaches
nobody."""


@dataclass(frozen=True, order=True)
class Listener:
    program: str
    address: str
    reached_from: str


def allowed() -> bool:
    """Whether this machine lets us have such a network."""
    try:
        return subprocess.run([*BETWEEN, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def listeners(processes: set[int]) -> set[Listener]:
    found = set()
    for pid in processes:
        try:
            inodes = _sockets(pid)
            if inodes:
                alone, program = _is_alone(pid), _program(pid)
                found |= {
                    Listener(program, *_described(address, alone))
                    for inode, address in _listening(pid)
                    if inode in inodes
                }
        except OSError:  # it has ended
            continue
    return found


def family(root: int) -> set[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for member in found:
        found += children.get(member, [])
    return set(found)


@contextmanager
def seen(root: int, every: float = 0.1) -> Iterator[set[Listener]]:
    """All that listens among a process and what it starts, while the block runs. Who has left the
    family, because its parent ended, is still looked at."""
    found: set[Listener] = set()
    known: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            known.update(family(root))
            found.update(listeners(known))
            done.wait(every)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def of_command(
    command: Sequence[str],
    cwd: Path,
    until: str | set[str] = "",
    seconds: float = 300,
    environment: Mapping[str, str] | None = None,
) -> set[Listener]:
    """What listens while a command runs to its end; or until it has printed that, or those programs
    listen, and three seconds more. The command stands in a network that has an interface beside
    loopback and leads nowhere."""
    log = cwd / "output.txt"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*BETWEEN, *command], stdout=output, stderr=output, cwd=cwd, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    def enough() -> bool:
        if isinstance(until, str):
            return bool(until) and until in log.read_text()
        return until <= {one.program for one in list(found)}

    end = time.monotonic() + seconds
    with seen(process.pid) as found:
        while process.poll() is None and not enough() and time.monotonic() < end:
            time.sleep(0.05)
        if until:
            time.sleep(3)
        done = enough() if until else process.poll() == 0
        members = family(process.pid)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60 if done else 1)
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert done, log.read_text()
    return found


def _sockets(pid: int) -> set[str]:
    links = []
    for handle in (PROC / str(pid) / "fd").iterdir():
        try:
            links.append(os.readlink(handle))
        except OSError:
            continue
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _listening(pid: int) -> Iterator[tuple[str, str]]:
    """Inodes and addresses of all sockets that listen in the network of a process."""
    for name in ("tcp", "tcp6"):
        path = PROC / str(pid) / "net" / name
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == LISTEN:
                yield words[9], _address(words[1].partition(":")[0])


def _address(text: str) -> str:
    """From the kernel's form: words of 32 bits, each in the order of this machine's bytes."""
    raw = b"".join(
        int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)
    )
    text = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return text.removeprefix("::ffff:")


def _is_alone(pid: int) -> bool:
    """Whether the network of a process has nothing but loopback."""
    folder = PROC / str(pid) / "net"
    routes = (folder / "route").read_text().splitlines()[1:]
    six = folder / "if_inet6"
    names = {line.split()[-1] for line in (six.read_text().splitlines() if six.exists() else ())}
    return not routes and names <= {"lo"}


def _described(address: str, alone: bool) -> tuple[str, str]:
    shown = "*" if address in EVERYWHERE else address
    if alone:
        return shown, "nowhere else: a network of its own"
    if address.startswith("127.") or address == "::1":
        return shown, "this machine"
    return shown, "the network"


def _program(pid: int) -> str:
    """As people call it."""
    words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    names = [os.path.basename(word) for word in words]
    if any("/ray/" in word for word in words) or names[0].startswith("ray::"):
        return "Ray"
    if "torch.distributed.run" in words:
        return "torchrun"
    if "with_flower.py" in names:
        return "Flower"
    flower = [name for name in names[:3] if name.startswith(("flower-", "flwr"))]
    return flower[0] if flower else "prefed"
