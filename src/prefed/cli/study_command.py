from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.options import Quiet, Track, Workers
from prefed.cli.text import say


def study(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="a TOML file, or a study that prefed has")
    ],
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False,
            help="directory of runs and results; runs that are there are not repeated",
        ),
    ] = Path("runs/study"),
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="stop after this time; the same command goes on")
    ] = None,
    draw: Annotated[bool, typer.Option("--draw", help="only draw, run nothing")] = False,
    again: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="forget all of these algorithms (a,b), and run them anew"
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="only print the study")] = False,
    workers: Workers = None,
    quiet: Quiet = False,
    track: Track = [],
) -> None:
    """Tune every algorithm with the same budget, then compare all with paired seeds.

    The grid of each algorithm has the same number of points, scored on a validation split
    with seeds of their own. Writes a table, a figure and the numbers behind both.
    """
    from prefed.cli.live import LiveRuns, for_minutes, split_names
    from prefed.cli.tables import show as show_table
    from prefed.cli.tables import table
    from prefed.core.machine import cores
    from prefed.experiments.jobs import Processes
    from prefed.experiments.stats import student
    from prefed.experiments.study import check, read
    from prefed.experiments.study_runs import StudyRuns
    from prefed.experiments.toml_files import find
    from prefed.experiments.trackers import Tracking
    from prefed.report import study_results as results

    name, plan = read(study)
    if show:
        print(find("studies", study).read_text(), end="")
        return
    check(study)  # also what would be run last
    student(1)  # if SciPy is missing, say so now and not after the runs
    study_runs = StudyRuns(plan, out, Tracking(track, out, name))
    if again is not None:
        study_runs.forget(split_names(again))
    over = False
    if not draw:
        many = Processes(workers or cores())
        with LiveRuns(study_runs.rounds(), quiet, out) as live, many as processes:
            on_event = for_minutes(minutes, live.on_event)
            try:
                study_runs.tune(processes, on_event)
                study_runs.compare(processes, on_event)
            except TimeoutError:
                over = True
    head, lines, note = results.write(study_runs, name)
    if quiet:
        return
    if lines:
        show_table(table(head, lines))
        say(f"{note}\nwritten: {out / name}.md, .png and .json".lstrip())
    else:
        print(f"{out}: no run of the comparison has ended yet")
    if over:
        print("not complete: the time is over; the same command goes on")
