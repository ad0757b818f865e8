"""The command line. Commands import what they need when they run: --help does not load torch."""

import signal
import sys
from typing import Annotated

import typer

from prefed import __version__
from prefed.cli import data_command, theory_command
from prefed.cli.bench_command import bench
from prefed.cli.compare_command import compare
from prefed.cli.deploy_command import deploy
from prefed.cli.options import Command
from prefed.cli.report_command import report, runs
from prefed.cli.run_command import run
from prefed.cli.show_command import cat, ls, validate
from prefed.cli.study_command import study
from prefed.cli.sweep_command import sweep
from prefed.cli.table_command import table
from prefed.cli.text import say
from prefed.cli.watch_command import watch
from prefed.experiments import nursery

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    suggest_commands=False,  # click does so already
)
for command in (
    run, compare, sweep, study, table, watch, report, runs, ls, cat, validate, deploy, bench
):  # fmt: skip
    app.command(cls=Command)(command)
for name, group in (("data", data_command), ("theory", theory_command)):
    app.add_typer(group.commands, name=name, no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"prefed {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Adaptive and preconditioned federated optimisation."""


IN_PROCESSES = ["compare"], ["sweep"], ["study"], ["table"]
"""Commands that train in processes of their own, which import meanwhile."""
DO_NOTHING = {"--help", "--show", "--draw"}


def main() -> None:
    """Exit codes: 0 done, 2 bad usage or config, 1 a run that failed, 130 interrupted."""
    from prefed.core import errors

    told: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        told.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # so that everything is closed
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    words = {*sys.argv[1:]}
    if sys.argv[1:2] in IN_PROCESSES and not words & DO_NOTHING:
        nursery.begin()
    try:
        app()
    except errors.PrefedError as error:
        code, text = 2, "\n".join(f"error: {line}" for line in str(error).splitlines())
    except errors.Diverged as error:
        code, text = 1, f"diverged: {error}"
    except (errors.CannotWrite, errors.RankLost, errors.RunFailed) as error:
        code, text = 1, f"error: {error}"
    except errors.Interrupted as error:
        code, text = 130, f"{error}; continue with --resume"
    except KeyboardInterrupt:
        code, text = 130, "stopped; continue with --resume"
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code, text = 1, f"error: {where}{error.strerror or error}"
    except Exception as error:
        memory = isinstance(error, RuntimeError) and "allocate memory" in str(error)
        if not (told or memory or isinstance(error, MemoryError)):
            raise
        code, text = 1, f"error: not enough memory: {error}"
    finally:  # it is over: one more Ctrl-C must not turn the exit code into a traceback
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        nursery.end()
    if told and code != 130:  # what is interrupted may raise something else, as imports do
        code, text = 130, "stopped; continue with --resume"
    say(text, "  ", sys.stderr)
    sys.exit(code)
