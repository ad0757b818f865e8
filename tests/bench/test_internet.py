"""The tables of docs/devices.md are those that bench/internet.py makes."""

from __future__ import annotations

import runpy

import pytest

from tests.helpers import ROOT


@pytest.mark.long
def test_the_tables_in_the_docs_are_made_by_the_script() -> None:
    page = (ROOT / "docs" / "devices.md").read_text()
    script = runpy.run_path(str(ROOT / "bench" / "internet.py"))
    for table in script["main"]().split("\n\n"):
        assert table in page
