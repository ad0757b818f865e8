"""Options that several commands have."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[str, typer.Argument(metavar="CONFIG|PRESET", help="a TOML file or a preset")]
Changes = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="change a key, such as rounds=10, algorithm=fedadam, client_lr=0.1, "
        "data.split.alpha=0.5; may be given more than once",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="directory to write to")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="runs at a time; by default the number of cores")
]

Track = Annotated[
    list[str], typer.Option(help="tensorboard, mlflow or wandb; may be given more than once")
]


def unused(name: str) -> Path:
    """A directory under runs/ that is not there: the name, the time, and a number if need be."""
    stamped = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stamped, *(f"{stamped}-{number}" for number in range(2, 1000)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())
