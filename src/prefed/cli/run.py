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
    set: Changes = [],  # noqa: B006
    out: Out = None,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="print each round as a JSON line")] = False,
) -> None:
    """Run one config or preset and write it to a directory."""
    from prefed import distributed
    from prefed.cli.progress import bar, describe, show_log_plainly, show_warnings_plainly
    from prefed.config import load
    from prefed.runs import execute, to_json

    show_warnings_plainly()
    if not quiet:
        show_log_plainly()
    loaded = load(config, set)
    distributed.start()
    if distributed.rank() > 0:  # the first rank writes and speaks for all
        execute(loaded, None)
        distributed.stop()
        return
    folder = out or _new_folder(config, loaded.algorithm.name, loaded.seed)
    if quiet or json:
        show = (
            (lambda record: print(to_json(record), flush=True)) if json else (lambda record: None)
        )
        execute(loaded, folder, show)
        return
    with bar(loaded.rounds, "rounds") as advance:
        result = execute(
            loaded,
            folder,
            lambda r: advance(describe(r), f"round {r['round']}/{loaded.rounds}  {describe(r)}"),
        )
    up = sum(record["bytes_up"] for record in result.history) / 1e6
    print(f"{loaded.algorithm.name}: {describe(result.history[-1])}, {up:.1f} MB up")
    print(f"written to {folder}")


def _new_folder(config: str, algorithm: str, seed: int) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{Path(config).stem}-{algorithm.replace(':', '.')}-seed{seed}-{stamp}"
    return Path("runs") / name
