import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.cli.options import Changes, Out, Quiet, Source

if TYPE_CHECKING:
    from prefed.experiments.config import Config


def found_from_elsewhere(config: "Config") -> "Config":
    """With whole paths of its data: Flower's processes stand in directories of their own."""
    from prefed.data.reading import VARIABLE, root
    from prefed.experiments.config import load

    os.environ[VARIABLE] = str(root(None).absolute())
    path = config.data.options.get("path")
    if not isinstance(path, str) or not Path(path).exists():
        return config
    table = config.to_dict()
    table["data"]["path"] = str(Path(path).absolute())
    return load(table)


def deploy(
    config: Source,
    set: Changes = [],
    local: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="a SuperLink and N SuperNodes on this machine"),
    ] = None,
    simulate: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="N nodes on Flower's simulation engine")
    ] = None,
    open_network: Annotated[
        bool,
        typer.Option(
            "--open-network",
            help="let the simulation engine listen on all interfaces of this machine",
        ),
    ] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write a Flower app for real machines")
    ] = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    min_fraction: Annotated[
        float,
        typer.Option("--min-fraction", "--quorum", help="share of a cohort that must answer"),
    ] = 0.5,
    retries: Annotated[int, typer.Option(help="how often missing clients are asked again")] = 2,
    round_seconds: Annotated[float, typer.Option(help="the longest that a round may take")] = 600.0,
    join_seconds: Annotated[float, typer.Option(help="how long to wait for nodes")] = 300.0,
    norm_cap: Annotated[
        float | None,
        typer.Option(help="refuse updates that change the weights by more than this norm"),
    ] = None,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="the server learns sums only")
    ] = False,
    secure_neighbours: Annotated[
        int | None,
        typer.Option(help="others that each node shares its secrets with; all unless set"),
    ] = None,
    largest_count: Annotated[
        int, typer.Option(help="most samples of a client, for secure sums of the nodes' own data")
    ] = 1_000_000,
    quiet: Quiet = False,
) -> None:
    """Run a config on Flower: on this machine, or written as an app for others.

    Choose one of --local, --simulate and --write. The run directory is the one that
    `prefed run` writes, with Flower's logs beside it; Ctrl-C ends every process, and
    the same command with --resume goes on after the last finished round.
    """
    from prefed.cli.progress import show_warnings_plainly
    from prefed.cli.run_command import new_folder
    from prefed.core.errors import checked
    from prefed.experiments.config import load
    from prefed.experiments.measures import describe
    from prefed.flower import require_flower

    if sum(choice is not None for choice in (local, simulate, write)) != 1:
        raise typer.BadParameter("choose one of --local N, --simulate N and --write DIR")
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the directory of the run to go on with")
    if write is not None and out is not None:
        raise typer.BadParameter("--out and --resume are for runs, and --write begins none")
    if open_network and simulate is None:
        raise typer.BadParameter("--open-network is for --simulate: nothing else opens the network")
    show_warnings_plainly()
    require_flower()
    from prefed.flower.arrivals import check_deployable
    from prefed.flower.deployment_options import Options

    loaded = load(config, set)
    given = {
        "min_fraction": min_fraction,
        "retries": retries,
        "round_seconds": round_seconds,
        "join_seconds": join_seconds,
        "norm_cap": norm_cap,
        "secure_aggregation": secure_aggregation,
        "secure_neighbours": secure_neighbours,
        "largest_count": largest_count,
    }
    options = checked(Options, given)
    if secure_aggregation and (local or simulate or 3) < 3:
        raise typer.BadParameter("--secure-aggregation: a sum needs three nodes or more")
    if secure_aggregation and (loaded.clients_per_round or 3) < 3:
        raise typer.BadParameter(
            f"--secure-aggregation: a sum needs clients on three nodes or more, and "
            f"clients_per_round is {loaded.clients_per_round}"
        )
    run = loaded.make_run()
    check_deployable(run.algorithm, run.settings, len(run.data))
    if loaded.devices is not None:
        print("devices: left out; clients are real here, and so is time", file=sys.stderr)
    if write is not None:
        from prefed.flower.write import write_app

        write_app(write, loaded, options)
        print(f"written to {write}; its README.md has the commands for real machines")
        return
    loaded = found_from_elsewhere(loaded)
    folder = out or new_folder(config, loaded.algorithm.name, loaded.seed)
    if local is not None:
        from prefed.flower.local_deployment import deploy_locally

        start = partial(deploy_locally, loaded, folder, local, options, resume=resume)
    else:
        from prefed.flower.simulated_deployment import deploy_simulated

        assert simulate is not None
        start = partial(
            deploy_simulated, loaded, folder, simulate, options, resume=resume,
            open_network=open_network,
        )  # fmt: skip
    records = watched(start, loaded.rounds, folder, quiet)
    if not quiet:
        print(f"{loaded.algorithm.name}: {describe(records[-1])}")
        if "ended" in records[-1]:
            print(f"ended early, after round {len(records)}: {records[-1]['ended']}")
        print(f"written to {folder}")


def watched(
    start: Callable[..., object], rounds: int, folder: Path, quiet: bool
) -> list[dict[str, object]]:
    """Start a deployment and show its rounds; the records of them."""
    from prefed.core.errors import Interrupted
    from prefed.experiments.bars import RoundBar

    records: list[dict[str, object]] = []
    with RoundBar(rounds, quiet) as progress:

        def see(record: dict[str, object]) -> None:
            records.append(record)
            progress.on_round(record)

        try:
            start(on_record=see, say=progress.say)
        except KeyboardInterrupt:  # typer would say no more than "Aborted"
            raise Interrupted(f"stopped after round {len(records)} of {folder}") from None
    return records
