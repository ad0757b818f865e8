"""Options that several commands have."""

import inspect
import re
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperCommand

Source = Annotated[str, typer.Argument(metavar="CONFIG|PRESET", help="a TOML file or a preset")]


def _steps_or_epochs(changes: list[str]) -> list[str]:
    """One of them in a preset gives way to the other; who says both has to choose."""
    if {"local_steps", "local_epochs"} <= {change.partition("=")[0].strip() for change in changes}:
        raise typer.BadParameter("local_steps: cannot stand beside local_epochs; take one of them")
    return changes


Changes = Annotated[
    list[str],
    typer.Option(
        "--set",
        callback=_steps_or_epochs,
        metavar="KEY=VALUE",
        help="change a key, such as rounds=10, algorithm=fedadam, client_lr=0.1, "
        "data.split.alpha=0.5; may be given more than once",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", file_okay=False, help="directory to write to; by default a new one in runs/"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="runs at a time; by default the number of cores")
]

Figures = Annotated[
    Path | None, typer.Option(metavar="DIR", help="also write the report's figures, as PDF and PNG")
]
Track = Annotated[
    list[str], typer.Option(help="tensorboard, mlflow or wandb; may be given more than once")
]


class Command(TyperCommand):
    """A command that knows what to say of `--rounds 5`: settings and options of the algorithm are
    changed with --set."""

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(self.help or ""))
        hints = get_type_hints(self.callback, include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.help is None:
                about = get_args(hints.get(parameter.name or ""))[-1]
                parameter.help = about.help  # click 8.5 forgets it

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            key = error.option_name.lstrip("-").replace("-", "_")
            options = [name.lstrip("-") for parameter in self.params for name in parameter.opts]
            near = get_close_matches(key, [*options, *_keys()], n=1, cutoff=0.75)
            if "set" not in options or not near or near[0] in options:
                possible = [f"--{name}" for name in near if name in options]
                raise click.NoSuchOption(error.option_name, None, possible, ctx) from None
            at = next(i for i, word in enumerate(given) if word.startswith(error.option_name))
            value = given[at].partition("=")[2] or (given[at + 1 : at + 2] or ["VALUE"])[0]
            text = f"No such option '{error.option_name}': write --set {near[0]}={value}"
            raise click.UsageError(text, ctx) from None


def _keys() -> set[str]:
    """What can be set without a dot: parts of a config, and options of algorithms."""
    from prefed.algorithms import ALGORITHMS
    from prefed.experiments.config import Config

    kinds = (ALGORITHMS.get(name) for name in ALGORITHMS.names())
    return {*Config.model_fields}.union(*(kind.model_fields for kind in kinds))


def told(name: str, options: dict[str, object], source: str) -> str:
    """'fedavg: client_lr 0.7, client_momentum 0.5, from the preset'."""
    from prefed.experiments.toml_files import presets

    where = "the preset" if source in presets() else source
    return f"{name}: {', '.join(f'{key} {value}' for key, value in options.items())}, from {where}"


def unused(name: str) -> Path:
    """A directory under runs/ that is not there: the name, the time, and a number if need be."""
    stamped = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stamped, *(f"{stamped}-{number}" for number in range(2, 1000)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())
