"""Processes that are ready at once: one imports what they need, and each is a copy of it.

    python -m prefed.experiments.nursery SOCKET

It begins while whoever wants processes still imports, waits on a socket for three open files, the
standard input, output and error of the next, and ends when the socket does. Where a process cannot
be copied after its imports (macOS), each imports for itself.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from typing import IO

COPIES = sys.platform == "linux"
PATIENCE = 2.0
"""Seconds in which it ends by itself."""


class Worker:
    """A process that reads jobs and writes events (jobs.py). It ends when its input does."""

    def __init__(self, stdin: int, stdout: int, stderr: int) -> None:
        """The other ends of its open files."""
        self.stdin: IO[str] = os.fdopen(stdin, "w")
        self.stdout, self.stderr = (os.fdopen(f, errors="replace") for f in (stdout, stderr))
        self.is_gone = False
        """It has ended by itself."""

    def end(self) -> None:
        """At once, in the middle of a job as well."""
        with suppress(OSError, ValueError):
            self.stdin.close()

    def close(self) -> None:
        """Wait until it has ended."""
        self.end()
        with suppress(OSError, ValueError):
            self.stdout.read()
            self.stdout.close()


class Nursery:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "prefed.experiments.nursery", str(theirs.fileno())]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def worker(self) -> Worker:
        """The next process. If there can be none it is one that has ended."""
        pipes = [os.pipe() for _ in range(3)]
        (input, stdin), (stdout, output), (stderr, errors) = pipes
        given = [input, output, errors]
        with suppress(OSError):
            socket.send_fds(self._socket, [b"+"], given)
        for file in given:
            os.close(file)
        return Worker(stdin, stdout, stderr)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def drop(self) -> None:
        """It has not been used."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Once its processes have ended, or are told to."""
        self._socket.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.terminate()
            self._process.wait()


_begun: list[Nursery] = []


def begin() -> None:
    """Start one for whoever asks first. For commands, before they import what takes long."""
    if not _begun:
        _begun.append(Nursery())


def end() -> None:
    """Nobody has asked for it."""
    while _begun:
        _begun.pop().drop()


def nursery() -> Nursery:
    """The one that was begun, or another."""
    return _begun.pop() if _begun else Nursery()


def _serve(asked: socket.socket) -> None:
    """In the process that is copied."""
    from prefed.experiments.jobs import prepare, work

    if COPIES:
        prepare()
    while True:
        told, files, _, _ = socket.recv_fds(asked, 1, 3)
        with suppress(ChildProcessError):  # those that have ended, or at last all
            while os.waitpid(-1, os.WNOHANG if told else 0)[0]:
                pass
        if not told:
            return
        if not COPIES:
            words = [sys.executable, "-m", "prefed.experiments.jobs"]
            subprocess.Popen(words, stdin=files[0], stdout=files[1], stderr=files[2])
        elif _copy() == 0:
            asked.close()
            above = [fcntl.fcntl(file, fcntl.F_DUPFD, 3) for file in files]
            for file in files:  # which may have had the numbers that they are to have
                os.close(file)
            for number, file in enumerate(above):
                os.dup2(file, number)
                os.close(file)
            work()
        for file in files:
            os.close(file)


def _copy() -> int:
    with warnings.catch_warnings():  # of threads: those of BLAS are none in the copy, and it knows
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent ends us
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        _serve(asked)
