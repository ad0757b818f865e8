"""The command line. Commands import what they need when they run: --help does not load torch."""

from __future__ import annotations

import sys

import typer

from prefed.cli import bench, compare, run, show

app = typer.Typer(
    help="Adaptive and preconditioned federated optimisation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (run, compare, bench, show):
    module.add_to(app)


def main() -> None:
    """Exit codes: 0 done, 2 bad usage or config, 1 a run that failed, 130 interrupted."""
    from prefed.errors import Diverged, PrefedError, RankLost

    try:
        app()
    except PrefedError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        sys.exit(1)
    except RankLost as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
