"""prefed theory constants, bounds, noise."""

import typer

from prefed.cli.options import Changes, Command, Out, Quiet, Source

commands = typer.Typer(help="What the paper's theory assumes and claims, measured on a config.")


@commands.command(cls=Command)
def constants(config: Source, set: Changes = [], out: Out = None, quiet: Quiet = False) -> None:
    """L, G, both gradient variances and F(w0) - F*, with 95 % intervals."""
    _study("constants", config, set, out, quiet)


@commands.command(cls=Command)
def bounds(config: Source, set: Changes = [], out: Out = None, quiet: Quiet = False) -> None:
    """Lemma 1, both theorems and corollaries beside runs of PreFed and PreFedOpt."""
    _study("bounds", config, set, out, quiet)


@commands.command(cls=Command)
def noise(config: Source, set: Changes = [], out: Out = None, quiet: Quiet = False) -> None:
    """Eq. (cov), Eq. (covreduced), and how isotropic the noise is behind each preconditioner."""
    _study("noise", config, set, out, quiet)


def _study(kind: str, source: str, changes: list[str], out: Out, quiet: bool) -> None:
    from prefed.cli.live import new_out
    from prefed.cli.progress import WorkBar, show_warnings_plainly
    from prefed.cli.tables import show, table
    from prefed.core.machine import torch_threads
    from prefed.experiments.config import load
    from prefed.theory.studies import STUDIES
    from prefed.theory.studies.common import prepare, save

    show_warnings_plainly()
    study = STUDIES[kind]
    pieces = study.pieces(load(source, changes))
    folder = prepare(out or new_out(f"theory-{kind}", source))
    # The passes of a study are small and many: threads that wait for each other inside them would
    # cost several times as much beside a busy neighbour.
    with torch_threads(1), WorkBar(pieces, quiet) as bar:
        found = study.run(source, changes, bar.tick)
    report = save(folder, f"{source}: {study.title}", found)
    if quiet:
        return
    for section in found.sections:
        for part in section.tables:
            show(table(part.headings, part.rows, section.title))
    print(f"report: {report}")
