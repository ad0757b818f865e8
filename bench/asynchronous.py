"""Client updates a second of asynchronous runs over those of synchronous ones, on W1.

    python bench/asynchronous.py [--passes 20] [--workers 2]

100 clients in flight, with lognormal speeds. A synchronous round averages 100 updates; the server
of an asynchronous run steps for every 100, 50 or 10. Smaller steps cost more in any run, so each
is also compared with synchronous rounds of as many updates. All take turns, so that a busy moment
of the machine hits all of them. Printed are the medians, and what asynchronous runs hold in memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from prefed import FedAvg, PreFed, Run, Settings
from prefed.algorithms import Algorithm
from prefed.bench.ratios import interleaved
from prefed.bench.workloads import w1
from prefed.training.asynchronous_trainer import AsynchronousTrainer

SPEED = {"distribution": "lognormal", "median": 100.0, "sigma": 1.0}
DEVICES = {"steps_per_second": SPEED, "up": 1e6, "down": 4e6, "latency": 0.05}
IN_FLIGHT = 100


SIZES = (100, 50, 10)


def make_run(algorithm: Algorithm, engine: str, workers: int, size: int, late: bool) -> Run:
    """size   updates in a round: of a cohort, or of a buffer if clients are late"""
    work = w1()
    settings = Settings(
        rounds=1_000_000,
        clients_per_round=size,
        local_steps=work.local_steps,
        batch_size=work.batch_size,
        engine=engine,
        workers=workers,
        device="cpu",
        devices=DEVICES,
        asynchronous={"concurrency": IN_FLIGHT} if late else None,
    )
    torch.manual_seed(0)
    return Run(algorithm, work.model(), work.data, settings)


def held(run: Run) -> str:
    """What a run holds besides the server."""
    assert isinstance(run.trainer, AsynchronousTrainer)
    underway = run.trainer.underway
    versions = [(v.weights, v.buffers, *v.shared.values()) for v in underway.versions.values()]
    updates = [row.update for row in underway.held.values()]
    rows = [(*update.values.values(), *update.kept.values()) for update in updates]
    size = sum(tensor.nbytes for tensors in versions + rows for tensor in tensors)
    counts = f"{len(versions)} versions and {len(rows)} updates"
    return f"{counts}, {size / run.server.weights.nbytes:.0f} times the weights"


def rounds_of(run: Run, count: int) -> Callable[[], None]:
    def rounds() -> None:
        for _ in range(count):
            run.run_round()

    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="vectorised")
    arguments = parser.parse_args()
    for algorithm in (FedAvg(client_lr=0.05), PreFed()):
        how = algorithm, arguments.engine, arguments.workers
        runs = {(n, late): make_run(*how, n, late) for n in SIZES for late in (False, True)}
        rounds = {}
        for (size, late), run in runs.items():
            rounds[f"{size} {late}"] = rounds_of(run, IN_FLIGHT // size)
            rounds_of(run, 12)()  # until as many versions are in use as will be
        times = interleaved(rounds, arguments.passes)
        whole = times[f"{IN_FLIGHT} False"]
        speed = f"{IN_FLIGHT / whole:.0f} updates a second in synchronous rounds of {IN_FLIGHT}"
        print(f"{type(algorithm).__name__}, {runs[IN_FLIGHT, False].trainer.engine}: {speed}")
        for size in SIZES:
            alike, seconds = times[f"{size} False"], times[f"{size} True"]
            print(
                f"  buffer {size:>3}: {IN_FLIGHT / seconds:.0f} updates a second, "
                f"{whole / seconds:.2f} of that, and {alike / seconds:.2f} of synchronous rounds "
                f"of {size}; holds {held(runs[size, True])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
