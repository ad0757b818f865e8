import sys
from typing import Annotated

import typer

from prefed.cli.options import Changes, Figures, Out, Quiet, Source, Track, Workers, told


def compare(
    config: Source,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="names with commas between them; by default all that the config has tuned"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs per algorithm, with seeds 0, 1, ...")] = 3,
    target: Annotated[float, typer.Option(min=0, max=1, help="accuracy to count rounds to")] = 0.9,
    set: Changes = [],
    out: Out = None,
    workers: Workers = None,
    quiet: Quiet = False,
    track: Track = [],
    figures: Figures = None,
) -> None:
    """Run several algorithms with several seeds, and rank them.

    Seeds are paired: each algorithm sees the same split, first weights, cohorts and batches.
    With --out, the same command again goes on where it was stopped.
    """
    from prefed.cli.live import LiveRuns, new_out, split_names
    from prefed.cli.tables import ranking, show
    from prefed.experiments.config import algorithms_of, tuned_options
    from prefed.experiments.plans import plan_comparison, run_all
    from prefed.experiments.ranking import group
    from prefed.experiments.trackers import Tracking
    from prefed.report import write_report

    names = algorithms_of(config) if algorithms is None else split_names(algorithms)
    folder = out or new_out("compare", config)
    planned = plan_comparison(config, names, seeds, set, folder)
    for plan in () if quiet else planned[: len(names)]:
        if tuned := tuned_options(config, plan.config):
            print(told(plan.config.algorithm.name, tuned, config), file=sys.stderr)
    tracking = Tracking(track, folder)
    with LiveRuns([plan.config.rounds for plan in planned], quiet, folder) as live:
        runs = run_all(planned, workers, live.on_event, tracking)
    write_report(
        runs, folder / "report.html", target=target, title=f"{config}: a comparison",
        figures=figures,
    )  # fmt: skip
    if not quiet:
        show(ranking(group(runs), target))
        print(f"report: {folder / 'report.html'}")
    if all(run.status == "diverged" for run in runs):
        print("every run diverged: lower the step sizes", file=sys.stderr)
