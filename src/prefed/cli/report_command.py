from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="directories with runs")]


def report(
    folders: Folders,
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file")] = Path("report.html"),
    target: Annotated[float, typer.Option(min=0, max=1, help="accuracy to count rounds to")] = 0.9,
    title: Annotated[str, typer.Option(help="heading of the report")] = "prefed report",
) -> None:
    """Write one HTML file that opens offline, and a folder of figures (PDF and PNG) beside it."""
    from prefed.core.errors import PrefedError
    from prefed.experiments.stored_runs import load_runs
    from prefed.report import write_report

    found = load_runs(*folders)
    if not found:
        raise PrefedError(f"{', '.join(map(str, folders))}: no runs there")
    figures = write_report(found, output, target=target, title=title)
    print(f"{len(found)} runs: {output} and {len(figures)} figures in {output.with_suffix('')}")


def runs(folders: Folders) -> None:
    """List the runs in directories: status, progress and headline figures."""
    from rich.console import Console
    from rich.table import Table

    from prefed.experiments.measures import measures
    from prefed.experiments.stored_runs import load_runs

    found = load_runs(*folders)
    shown = measures(found)
    figures = [heading for m in shown for heading in (m.heading, f"best{m.unit}")]
    view = Table("run", "algorithm", "seed", "status", "rounds", *figures, "MB up")
    for run in found:
        cells = []
        for m in shown:
            values = m.of(run)
            cells += [m.text(values[-1]), m.text(m.best(values))] if values else ["-", "-"]
        view.add_row(
            str(run.folder), run.algorithm, str(run.seed),
            "ended early" if run.ended else run.status,
            f"{len(run.history)}/{run.config['rounds']}", *cells,
            f"{run.total('bytes_up') / 1e6:.1f}",
        )  # fmt: skip
    Console().print(view)
