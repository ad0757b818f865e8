import sys
from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.options import Changes, Out, Quiet, Source, Track, told, unused


def run(
    config: Source,
    set: Changes = [],
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="print each round as a JSON line")] = False,
    track: Track = [],
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="tell where the time goes: a table, also in profile.txt, and trace.json for "
            "ui.perfetto.dev",
        ),
    ] = False,
) -> None:
    """Run one config or preset and write it to a directory.

    Ctrl-C finishes the round, saves and stops; a second one stops at once. Either way
    the same command with --resume goes on and ends in the same bits. Under torchrun
    the ranks share each cohort.
    """
    from contextlib import nullcontext

    from prefed.cli.interrupt import StopOnSignal
    from prefed.cli.progress import JsonLines, show_log_plainly, show_warnings_plainly
    from prefed.experiments.bars import RoundBar
    from prefed.experiments.config import load, tuned_options
    from prefed.experiments.measures import describe, megabytes
    from prefed.experiments.profile import Profile, since_start
    from prefed.experiments.run_directory import execute
    from prefed.experiments.trackers import tracker
    from prefed.training import ranks

    show_warnings_plainly()
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the directory of the run to go on with")
    loaded = load(config, set)
    folder = out or new_folder(config, loaded.algorithm.name, loaded.seed)
    trackers = [tracker(name, folder) for name in track]
    progress = JsonLines() if json else RoundBar(loaded.rounds, quiet)
    with ranks.joined() as speaks:
        if speaks and not quiet:
            show_log_plainly()
            if tuned := tuned_options(config, loaded):
                print(told(loaded.algorithm.name, tuned, config), file=sys.stderr)
        profiles = [Profile(since_start())] if profile and speaks else []
        callbacks = [progress, *trackers, *profiles]
        watching = profiles[0].watching() if profiles else nullcontext()
        with StopOnSignal(quiet=not speaks) as stop, watching:
            result = execute(loaded, folder, resume=resume, callbacks=callbacks, stop=stop.asked)
    if speaks and not (quiet or json):
        up = sum(record["bytes_up"] for record in result.history)
        print(f"{loaded.algorithm.name}: {describe(result.history[-1])}, {megabytes(up)} MB up")
        if result.ended:
            print(f"ended early, after round {len(result.history)}: {result.ended}")
        if result.best_round is not None:
            print(f"best in round {result.best_round}: {folder / 'best.safetensors'}")
        print(f"written to {folder}")
    for told_by in profiles:
        table = told_by.write(folder)
        print("" if quiet or json else f"\n{table}", end="")


def new_folder(config: str, algorithm: str, seed: int) -> Path:
    return unused(f"{Path(config).stem}-{algorithm.replace(':', '.')}-seed{seed}")
