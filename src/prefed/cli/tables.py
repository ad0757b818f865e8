"""Tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from prefed.summary import Group

HEADINGS = (
    "accuracy %\n[95 % interval]",
    "p vs\nbest",
    "rounds\nto {target}",
    "MB up\nto {target}",
    "MB\nup",
    "MB\ndown",
    "s",
)


def ranking(groups: list[Group], target: float) -> Table:
    """Best mean accuracy first. A run that diverged is shown as diverged, never left out."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("algorithm", no_wrap=True)
    for heading in HEADINGS:
        view.add_column(heading.format(target=f"{target:.0%}"), justify="right", no_wrap=True)
    for group in groups:
        view.add_row(group.label, *ranking_cells(group, target))
    return view


def ranking_cells(group: Group, target: float) -> list[str]:
    mean, interval, reached = group.mean(), group.interval(), group.to_target(target)
    accuracy = "-" if mean is None else f"{100 * mean:.1f}"
    if interval is not None:
        accuracy += f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    for status in ("diverged", "interrupted", "running"):
        if count := group.count(status):
            accuracy += f" ({count}/{len(group.runs)} {status})"
    rounds = megabytes = "-"
    if reached is not None:
        some = f" ({reached[2]}/{len(group.runs)})" if reached[2] < len(group.runs) else ""
        rounds, megabytes = f"{reached[0]:.0f}{some}", f"{reached[1]:.1f}"
    return [
        accuracy,
        "" if group.p_value is None else f"{group.p_value:.2g}",
        rounds,
        megabytes,
        f"{group.mean_total('bytes_up') / 1e6:.1f}",
        f"{group.mean_total('bytes_down') / 1e6:.1f}",
        f"{group.mean_total('seconds'):.1f}",
    ]
