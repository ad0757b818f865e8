import math
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.cli.options import Changes, Figures, Out, Quiet, Source, Track, Workers

if TYPE_CHECKING:
    from prefed.experiments.stored_runs import StoredRun
    from prefed.experiments.sweep import Scored


def sweep(
    config: Source,
    grid: Annotated[
        list[str], typer.Option(metavar="KEY=A,B,C", help="values to try; once per key")
    ] = [],
    range: Annotated[
        list[str],
        typer.Option(metavar="KEY=LOW:HIGH", help="a range to draw from on a log scale"),
    ] = [],
    random: Annotated[
        int | None, typer.Option(min=1, help="number of points to draw at random")
    ] = None,
    optuna: Annotated[
        int | None, typer.Option(min=1, help="number of points that Optuna chooses")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs per point")] = 1,
    set: Changes = [],
    out: Out = None,
    workers: Workers = None,
    quiet: Quiet = False,
    track: Track = [],
    figures: Figures = None,
) -> None:
    """Try values of config keys, choose the best on a validation split, test it once.

    The validation split is taken from the training samples (data.validation, a fifth
    unless set); the test set is looked at once, with the chosen point.
    With --out, the same command again goes on where it was stopped.
    """
    from prefed.cli.live import LiveRuns, new_out
    from prefed.core.errors import PrefedError
    from prefed.core.machine import cores
    from prefed.experiments.config import load
    from prefed.experiments.jobs import Processes
    from prefed.experiments.sweep import Optuna, Space, Suggest, all_at_once, evaluate_best, on_edge
    from prefed.experiments.sweep import sweep as run_sweep
    from prefed.experiments.trackers import Tracking
    from prefed.report import write_report

    space = Space(dict(map(_list, grid)), dict(map(_range, range)))
    if "seed" in {*space.lists, *space.ranges}:
        raise PrefedError("--grid: a seed is nothing to tune; --seeds N gives each point N of them")
    if both := {*space.lists} & {*space.ranges}:
        raise PrefedError(f"{min(both)}: is in --grid and in --range; take one of them")
    if not (space.lists or space.ranges):
        raise PrefedError("--grid: give at least one key with values, as client_lr=0.01,0.1")
    suggest: Suggest
    if optuna:
        suggest = Optuna(space, optuna, workers or cores())
        total = optuna
    else:
        tried = space.random(random) if random else space.grid()
        suggest, total = all_at_once(tried), len(tried)
    folder = out or new_out("sweep", config)
    tracking = Tracking(track, folder)
    rounds, many = load(config, set).rounds, Processes(workers or cores())
    with LiveRuns([rounds] * (total + 1) * seeds, quiet, folder) as live, many as processes:
        rest = seeds, folder, processes, live.on_event, tracking
        scored = run_sweep(config, set, suggest, *rest)
        best = scored[0]
        if not math.isfinite(best.score):
            raise PrefedError("every point diverged: lower the step sizes")
        tested = evaluate_best(config, set, best, *rest)
    edges = [
        f"{key}={best.point[key]} lies on the edge of the grid: try values beyond it"
        for key in on_edge(space.lists, best.point)
    ]
    everything = [*(run for s in scored for run in s.runs), *tested]
    write_report(
        everything, folder / "report.html", title=f"{config}: a sweep", sweep=scored, notes=edges,
        figures=figures,
    )  # fmt: skip
    if not quiet:
        _print(scored, tested, edges)
        print(f"report: {folder / 'report.html'}")


def _print(scored: "list[Scored]", tested: "list[StoredRun]", edges: list[str]) -> None:
    """The points, the best first, and what that one gives on the test set."""
    from prefed.cli.tables import points, show
    from prefed.experiments.measures import measure
    from prefed.experiments.ranking import Group

    show(points(scored))
    chosen = " ".join(f"--set {key}={value}" for key, value in scored[0].point.items())
    by = measure(tested)
    mean = Group("best", tested, measure=by).mean()
    print(f"best on the validation split: {chosen}")
    value = "-" if mean is None else by.text(mean) + by.unit
    print(f"its {by.name} on the test set: {value}")
    for line in edges:
        print(line)


def _list(text: str) -> tuple[str, list[str]]:
    from prefed.core.errors import PrefedError

    key, _, values = text.partition("=")
    parts = [value.strip() for value in values.split(",") if value.strip()]
    if not key or not parts:
        raise PrefedError(f"--grid {text}: should have the form key=value,value")
    return key.strip(), parts


def _range(text: str) -> tuple[str, tuple[float, float]]:
    from prefed.core.errors import PrefedError

    key, _, values = text.partition("=")
    try:
        low, high = map(float, values.split(":"))
    except ValueError:
        low = high = 0.0
    if not key or not 0 < low < high:
        raise PrefedError(f"--range {text}: should have the form key=low:high with 0 < low < high")
    return key.strip(), (low, high)
