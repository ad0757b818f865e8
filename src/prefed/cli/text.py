"""Lines on a terminal: folded between words, which a terminal by itself does not. Pipes get them
whole."""

import re
import shutil
import sys
import textwrap
from typing import TextIO


def say(text: str, hang: str = "", file: TextIO | None = None) -> None:
    """Print lines; `hang` stands before what is left of one that is too long."""
    print(folded(text, hang, file or sys.stdout), file=file or sys.stdout)


def folded(text: str, hang: str, file: TextIO) -> str:
    if not file.isatty():
        return text
    width, lines = shutil.get_terminal_size().columns, []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent + hang, break_long_words=False,
            break_on_hyphens=False,
        ) or [""]  # fmt: skip
    return "\n".join(lines)


def joined(about: str) -> str:
    """A docstring with each paragraph on one line, for `say`; tables in it stay as they are."""
    found = (re.split(r"\n", paragraph) for paragraph in about.split("\n\n"))
    return "\n\n".join(
        "\n".join(lines) if any(re.search(r"^\s|  ", line) for line in lines) else " ".join(lines)
        for lines in found
    )
