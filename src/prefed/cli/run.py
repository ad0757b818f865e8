from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.options import Changes, Out, Quiet, Source


def add_to(app: typer.Typer) -> None:
    app.command()(run)


def run(
    config: Source,
    set: Changes = [],
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="print each round as a JSON line")] = False,
    track: Annotated[
        list[str], typer.Option(help="tensorboard, mlflow or wandb; may be given more than once")
    ] = [],
) -> None:
    """Run one config or preset and write it to a directory.

    Ctrl-C finishes the round, saves and stops; a second one stops at once. Either way
    the same command with --resume goes on and ends in the same bits. Under torchrun
    the ranks share each cohort.
    """
    from prefed import distributed
    from prefed.cli.interrupt import StopOnSignal
    from prefed.cli.progress import (
        JsonLines,
        RoundBar,
        describe,
        show_log_plainly,
        show_warnings_plainly,
    )
    from prefed.config import load
    from prefed.runs import execute
    from prefed.tracking import tracker

    show_warnings_plainly()
    if not quiet:
        show_log_plainly()
    loaded = load(config, set)
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the directory of the run to go on with")
    distributed.start()
    if distributed.rank() > 0:  # the first rank writes and speaks for all
        with StopOnSignal(quiet=True) as stop:
            execute(loaded, stop=stop.asked)
        distributed.stop()
        return
    folder = out or new_folder(config, loaded.algorithm.name, loaded.seed)
    trackers = [tracker(name, folder) for name in track]
    progress = JsonLines() if json else RoundBar(loaded.rounds, quiet)
    with progress, StopOnSignal() as stop:
        result = execute(
            loaded, folder, resume=resume, callbacks=[progress, *trackers], stop=stop.asked
        )
    if not (quiet or json):
        up = sum(record["bytes_up"] for record in result.history) / 1e6
        print(f"{loaded.algorithm.name}: {describe(result.history[-1])}, {up:.1f} MB up")
        print(f"written to {folder}")
    distributed.stop()


def new_folder(config: str, algorithm: str, seed: int) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{Path(config).stem}-{algorithm.replace(':', '.')}-seed{seed}-{stamp}"
    return Path("runs") / name
