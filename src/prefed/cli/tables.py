"""Tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from prefed.summary import HEADINGS, Group


def ranking(groups: list[Group], target: float) -> Table:
    """Best mean accuracy first. A run that diverged is shown as diverged, never left out."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("algorithm", no_wrap=True)
    for heading in HEADINGS:
        view.add_column(heading.format(target=f"{target:.0%}"), justify="right", no_wrap=True)
    for group in groups:
        view.add_row(group.label, *group.cells(target))
    return view
