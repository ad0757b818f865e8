"""Tables for the terminal, and for pipes, where nothing is folded or cut."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from prefed.experiments.measures import duration, measure
from prefed.experiments.ranking import Group, headings
from prefed.experiments.sweep import Scored

NARROWEST = 12
"""A column of text is not folded to less."""


def table(headings: Iterable[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """A table whose columns of numbers are aligned to the right."""
    view = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    view.collapse_padding = True
    cells = list(rows)
    for number, heading in enumerate(headings):
        numbers = all(row[number][:1] in "-+0123456789" for row in cells)
        view.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        view.add_row(*row)
    return view


def show(view: Table) -> None:
    """Print a table. In a terminal that is too narrow intervals go below what they are of, and
    columns of text are folded, the widest first; numbers never are."""
    console = Console()
    terminal, console.width = console.width, 1 << 16
    width = console.measure(view).maximum
    if console.is_terminal and width > terminal:
        for column in view.columns:
            column._cells = [str(cell).replace(" [", "\n[") for cell in column.cells]
        width = console.measure(view).maximum
    texts = [c for c in view.columns if c.justify == "left"]
    widths = {id(c): max(map(len, map(str, [c.header, *c.cells]))) for c in texts}
    while console.is_terminal and width > terminal and max(widths.values(), default=0) > NARROWEST:
        column = max(texts, key=lambda c: widths[id(c)])
        widths[id(column)] = column.max_width = widths[id(column)] - 1
        width -= 1
    console.width = width
    console.print(view)


def ranking(groups: list[Group], target: float) -> Table:
    """Best mean first. A run that diverged is shown as diverged, never left out."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    view.add_column("algorithm", no_wrap=True)
    for heading in headings(groups[0], target):
        view.add_column(heading, justify="right", no_wrap=True)
    for group in groups:
        view.add_row(group.label, *group.cells(target))
    return view


def points(scored: list[Scored], most: int = 20) -> Table:
    """The points of a sweep, best first."""
    by = measure([run for s in scored for run in s.runs])
    timed, rows = any(run.timed for s in scored for run in s.runs), []
    for s in scored[:most]:
        value = "diverged" if s.score == -math.inf else by.text(by.sign * s.score)
        ends = [run.history[-1]["seconds_virtual"] for run in s.runs if run.timed]
        time = duration(fmean(ends)) if ends else "-"
        rows.append([*s.point.values(), value, *([time] if timed else [])])
    heads = [by.heading("validation"), *(["virtual time"] if timed else [])]
    view = table([*scored[0].point, *heads], rows)
    if len(scored) > most:
        view.caption = f"and {len(scored) - most} more points"
    return view
