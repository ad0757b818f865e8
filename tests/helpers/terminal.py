"""What a person sees: a command in a terminal of a given width, and the screen it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path


def in_terminal(*words: str, columns: int, cwd: Path, code: int = 0) -> list[str]:
    """Run `prefed` in a terminal; the lines on its screen when it has ended with that code."""
    pid, handle = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ |= {"COLUMNS": str(columns), "TERM": "xterm"}
        os.execv(sys.executable, [sys.executable, "-m", "prefed", *words])
    fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    written = b""
    while True:
        try:
            part = os.read(handle, 1 << 16)
        except OSError:  # the other side has gone
            break
        if not part:
            break
        written += part
    os.close(handle)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, written.decode()
    return screen(written.decode())


def screen(written: str) -> list[str]:
    """The lines that remain: colours mean nothing, and the cursor moves as rich moves it."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif move := re.fullmatch(r"\x1b\[(\d*)A", token):
            row = max(0, row - int(move[1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = (
                lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            )
            column += len(token)
    return [line.rstrip() for line in lines]
