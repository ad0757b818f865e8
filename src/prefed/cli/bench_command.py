from typing import Annotated

import typer


def bench(
    what: Annotated[
        list[str] | None, typer.Argument(help="W1 to W4, a config or a preset; default: W1 to W4")
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="rounds of each, interleaved")] = 5,
    engine: Annotated[str, typer.Option(help="sequential, vectorised, compiled or auto")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="threads")] = 1,
    beside: Annotated[
        int, typer.Option(min=0, help="busy processes beside it, to see what a neighbour costs")
    ] = 0,
) -> None:
    """Measure prefed against bare PyTorch loops on this machine, as ratios."""
    from prefed.bench import ratios
    from prefed.bench.workloads import WORKLOADS
    from prefed.experiments.config import load

    for name in what or list(WORKLOADS):
        known = name.upper() in WORKLOADS
        lines = (
            ratios.bench(name.upper(), passes, engine, workers, beside)
            if known
            else ratios.bench_config(load(name), passes)
        )
        for line in lines:
            print(line, flush=True)
