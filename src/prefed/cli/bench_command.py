from typing import Annotated

import typer


def bench(
    what: Annotated[
        list[str] | None, typer.Argument(help="W1 to W7, a config or a preset; default: W1 to W7")
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="rounds of each, interleaved")] = 5,
    engine: Annotated[
        str,
        typer.Option(help="sequential, vectorised, native, compiled or auto; several with commas"),
    ] = "",
    workers: Annotated[int, typer.Option(min=1, help="threads")] = 1,
    beside: Annotated[
        int, typer.Option(min=0, help="busy processes beside it, to see what a neighbour costs")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: a GPU, with every engine")] = "cpu",
) -> None:
    """Measure prefed against bare PyTorch loops on this machine, as ratios. What it prints is made
    to be pasted."""
    from prefed.bench.ratios import HEAD, How, bench, bench_config
    from prefed.bench.workloads import WORKLOADS
    from prefed.experiments.config import load
    from prefed.experiments.environment import environment
    from prefed.training.engines.engine import ENGINES, check_engine
    from prefed.training.task import choose_device

    device = str(choose_device(device))
    engines = engine.split(",") if engine else ["auto"] if device == "cpu" else ENGINES.names()
    for name in engines:
        check_engine(name)
    how, rows = How(passes, engines, workers, beside, device), list[str]()
    print("; ".join(f"{k} {v}" for k, v in environment().items() if v is not None), flush=True)
    for name in what or list(WORKLOADS):
        if name.upper() in WORKLOADS:
            measured = bench(name.upper(), how)
            rows += measured.rows()
            lines = measured.lines()
        else:
            lines = bench_config(load(name), passes)
        for line in lines:
            print(line, flush=True)
    if rows:
        print("", *HEAD, *rows, sep="\n")
