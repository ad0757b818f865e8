"""Tables for the terminal."""

import math

from rich import box
from rich.table import Table

from prefed.experiments.measures import measure
from prefed.experiments.ranking import Group, headings
from prefed.experiments.sweep import Scored


def ranking(groups: list[Group], target: float) -> Table:
    """Best mean first. A run that diverged is shown as diverged, never left out."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    view.add_column("algorithm", no_wrap=True)
    for heading in headings(groups[0].measure, target, groups[0].fair):
        view.add_column(heading, justify="right", no_wrap=True)
    for group in groups:
        view.add_row(group.label, *group.cells(target))
    return view


def points(scored: list[Scored], most: int = 20) -> Table:
    """The points of a sweep, best first."""
    view = Table(*scored[0].point)
    by = measure([run for s in scored for run in s.runs])
    view.add_column(f"validation {by.name}{by.unit}", justify="right")
    for s in scored[:most]:
        value = "diverged" if s.score == -math.inf else by.text(by.sign * s.score)
        view.add_row(*s.point.values(), value)
    if len(scored) > most:
        view.caption = f"and {len(scored) - most} more points"
    return view
