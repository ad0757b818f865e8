from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.options import Quiet, Workers


def table(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="a TOML file, or a table that prefed has")
    ],
    out: Annotated[
        Path,
        typer.Option(help="directory of runs and results; runs that are there are not repeated"),
    ] = Path("runs/tables"),
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="stop after this time; the same command goes on")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help='only cells with these words in row, column or setting: "iid FedAvg"'),
    ] = None,
    draw: Annotated[bool, typer.Option("--draw", help="only write the table, run nothing")] = False,
    show: Annotated[bool, typer.Option("--show", help="only print what is to be run")] = False,
    workers: Workers = None,
    quiet: Quiet = False,
) -> None:
    """Compute a table again that others printed, and set both numbers side by side."""
    from prefed.cli.live import LiveRuns, for_minutes
    from prefed.cli.tables import show as show_table
    from prefed.cli.tables import table as make_table
    from prefed.cli.text import say
    from prefed.core.safe_files import write_whole
    from prefed.experiments.printed_tables import HEADINGS, TableRuns, read, rows, to_markdown
    from prefed.experiments.toml_files import find

    if only is not None and draw:
        raise typer.BadParameter("--only: chooses what is run; --draw writes all there is")
    name, plan = read(table)
    if show:
        print(find("tables", table).read_text(), end="")
        return
    runs, over = TableRuns(name, plan, out), False
    if not draw:
        with LiveRuns([plan.config.rounds for plan in runs.chosen(only)], quiet, out) as live:
            try:
                runs.run(workers, for_minutes(minutes, live.on_event), only)
            except TimeoutError:
                over = True
    text = to_markdown(runs)
    write_whole(out / f"{name}.md", text)
    if not quiet:
        say(f"{plan.title}\n{plan.source}")
        show_table(make_table(HEADINGS, [cells for *cells, _ in rows(runs)]))
        say(f"with the command of each: {out / name}.md")
        if over:
            print("not complete: the time is over; the same command goes on")
