"""What a person sees: a command in a terminal of a given width, and the screen it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.commands import exit_code


def in_terminal(*words: str, columns: int, cwd: Path, code: int = 0) -> list[str]:
    """Run `prefed` in a terminal; the lines on its screen when it has ended with that code. It is
    run by this process, which has imported torch already, and writes to a real terminal."""
    handle, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    parts: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other side has gone
            while part := os.read(handle, 1 << 16):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(side, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")
        ended = exit_code(*words, cwd=cwd, out=terminal, err=terminal)
    reader.join()
    os.close(handle)
    written = b"".join(parts).decode()
    assert ended == code, written
    return screen(written)


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
