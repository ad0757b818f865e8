from __future__ import annotations

from typing import Annotated

import typer

from prefed.cli.options import Changes, Out, Quiet, Source


def add_to(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    config: Source,
    algorithms: Annotated[
        str | None,
        typer.Option(help="names with commas between them; by default all the config has tuned"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs per algorithm, with seeds 0, 1, ...")] = 3,
    target: Annotated[float, typer.Option(min=0, max=1, help="accuracy to count rounds to")] = 0.9,
    set: Changes = [],  # noqa: B006
    out: Out = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: cores")] = None,
    quiet: Quiet = False,
) -> None:
    """Run several algorithms with several seeds side by side, and print the table."""
    from rich.console import Console

    from prefed.cli.progress import bar, describe
    from prefed.compare import Run, table
    from prefed.compare import compare as run_all
    from prefed.config import algorithms_of

    names = algorithms.split(",") if algorithms else algorithms_of(config)

    with bar(len(names) * seeds, "runs") as advance:

        def show(run: Run, event: dict[str, object]) -> None:
            if "record" in event:
                return
            title = f"{run.algorithm} seed {run.seed}"
            text = run.problem or describe(run.history[-1])
            advance(f"{title}: {text}", None if quiet else f"{title}: {text}")

        runs = run_all(config, names, seeds, set, out, workers, show)
    Console().print(table(runs, target))
    if any(run.problem and run.problem != "diverged" for run in runs):
        raise typer.Exit(1)
