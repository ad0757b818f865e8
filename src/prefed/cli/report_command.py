from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.options import Figures

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="directories with runs")]


def report(
    folders: Folders,
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file")] = Path("report.html"),
    target: Annotated[float, typer.Option(min=0, max=1, help="accuracy to count rounds to")] = 0.9,
    title: Annotated[str, typer.Option(help="heading of the report")] = "prefed report",
    figures: Figures = None,
) -> None:
    """Write one HTML file that opens offline, and with --figures a folder of figures."""
    from prefed.cli.progress import show_warnings_plainly
    from prefed.experiments.stored_runs import load_runs
    from prefed.report import write_report

    show_warnings_plainly()
    found = load_runs(*folders)
    if not found:
        raise no_runs(folders)
    drawn = write_report(found, output, target=target, title=title, figures=figures)
    more = f" and {len({path.stem for path in drawn})} figures in {figures}" if drawn else ""
    print(f"{len(found)} {'run' if len(found) == 1 else 'runs'}: {output}{more}")


def runs(folders: Folders) -> None:
    """List the runs in directories: status, progress and headline figures."""
    from prefed.cli.progress import show_warnings_plainly
    from prefed.cli.tables import show, table
    from prefed.experiments.measures import measures, megabytes
    from prefed.experiments.stored_runs import load_runs

    show_warnings_plainly()
    found = load_runs(*folders)
    if not found:
        raise no_runs(folders)
    shown = measures(found)
    splits = "/\n".join(sorted({run.split for run in found}))
    figures = [
        heading for m in shown for heading in (f"{splits}\n{m.name}{m.unit}", f"best\n{m.unit}")
    ]
    private = any(run.epsilon is not None for run in found)
    figures += ["epsilon"] if private else []
    rows = []
    for run in found:
        cells = []
        for m in shown:
            values = m.of(run)
            cells += [m.text(values[-1]), m.text(m.best(values))] if values else ["-", "-"]
        if private:
            cells.append("-" if run.epsilon is None else f"{run.epsilon:.4g}")
        progress = f"{len(run.history)}/{run.config['rounds']}"
        up = megabytes(run.total("bytes_up"))
        status = "ended early" if run.ended else run.status
        rows.append([str(run.folder), run.algorithm, str(run.seed), status, progress, *cells, up])
    show(table(["run", "algorithm", "seed", "status", "rounds", *figures, "MB\nup"], rows))


def no_runs(folders: list[Path]) -> Exception:
    from prefed.core.errors import PrefedError

    return PrefedError(f"{', '.join(map(str, folders))}: no runs there")
