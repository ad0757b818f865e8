"""A network of its own for a command, with nothing but loopback (Linux).

    python -m prefed.core.private_network COMMAND ...

Ray and torchrun listen on all interfaces, whatever address they are told. In a network namespace of
their own nobody outside the machine reaches them, nor does any other program on it. Neither root
nor a tool of the system is needed, where the kernel lets users have namespaces.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

from prefed.core.errors import PrefedError

LOOPBACK = b"lo"
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1


def inside(*command: str) -> list[str]:
    """The command in a network of its own; as it is, where there is nothing but loopback already.
    PrefedError where that cannot be had."""
    if is_alone():
        return list(command)
    wrapped = [sys.executable, "-m", "prefed.core.private_network"]
    tried = subprocess.run([*wrapped, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        lines = tried.stderr.strip().splitlines() or [f"ended with code {tried.returncode}"]
        raise PrefedError(lines[-1].removeprefix("error: "))
    return [*wrapped, *command]


def is_alone() -> bool:
    """Whether this process has loopback, and no other interface that is up."""
    if sys.platform != "linux":
        return False
    try:
        up = {name.encode() for _, name in socket.if_nameindex() if _flags(name.encode()) & IFF_UP}
    except OSError:  # one that went away meanwhile: this is not a network of one's own
        return False
    return up == {LOOPBACK}


def enter() -> None:
    """Move this process, and what it starts from now on, into a network of its own. It must not
    have started threads."""
    if sys.platform != "linux":
        raise PrefedError(f"there is no network of one's own on this system ({sys.platform})")
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(CLONE_NEWNET)  # with the rights of root, and files stay whose they are
    except OSError:
        try:
            _unshare(CLONE_NEWUSER | CLONE_NEWNET)
            # Everybody is still who they were, or files that are made would be nobody's.
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        except OSError as error:
            raise PrefedError(
                f"this system allows no network of one's own ({error.strerror})"
            ) from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        up = struct.pack("16sh14x", LOOPBACK, _flags(LOOPBACK) | IFF_UP)
        fcntl.ioctl(handle, SIOCSIFFLAGS, up)
    if not is_alone():
        raise PrefedError("the new network has more than loopback")


def _flags(name: bytes) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, SIOCGIFFLAGS, struct.pack("16sh14x", name, 0))
    return int(struct.unpack("16sh14x", answer)[1])


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m prefed.core.private_network COMMAND ...")
    try:
        enter()
        os.execvp(sys.argv[1], sys.argv[1:])
    except PrefedError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
