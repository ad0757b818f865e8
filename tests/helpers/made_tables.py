"""Tables in the documentation that a program makes, between two marks, and that tests compare."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import ROOT

SECURITY = ROOT / "docs" / "security.md"


def rows(name: str, page: Path = SECURITY) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = _between(page.read_text(), name)[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write(
    name: str, head: Sequence[str], cells: Sequence[Sequence[str]], page: Path = SECURITY
) -> None:
    before, _, after = _between(page.read_text(), name)
    top, *more = (f"| {' | '.join(line)} |" for line in [head, *cells])
    table = "\n".join([top, "|---" * len(head) + "|", *more])
    page.write_text(f"{before}{table}\n{after}")


def _between(text: str, name: str) -> tuple[str, str, str]:
    start, end = f"<!-- {name}: made by a program -->\n", f"<!-- end of {name} -->"
    found = re.fullmatch(rf"(.*{re.escape(start)})(.*?)({re.escape(end)}.*)", text, flags=re.DOTALL)
    assert found, f"the page has no place for the table {name!r}"
    return found[1], found[2], found[3]
