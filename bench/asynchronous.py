"""Client updates a second of asynchronous runs over those of synchronous ones, on W1.

    python bench/asynchronous.py [--passes 20] [--workers 2]

100 clients in flight, with lognormal speeds. A synchronous round averages 100 updates; the server
of an asynchronous run steps for every 100, 50 or 10. All take turns, so that a busy moment of the
machine hits all of them. Printed are the medians, and what asynchronous runs hold in memory.
"""

from __future__ import annotations

import argparse
import time

import torch

from prefed import FedAvg, PreFed, Run, Settings
from prefed.algorithms import Algorithm
from prefed.bench.ratios import interleaved
from prefed.bench.workloads import w1
from prefed.training.asynchronous_trainer import AsynchronousTrainer

SPEED = {"distribution": "lognormal", "median": 100.0, "sigma": 1.0}
DEVICES = {"steps_per_second": SPEED, "up": 1e6, "down": 4e6, "latency": 0.05}
IN_FLIGHT = 100


def make_run(algorithm: Algorithm, engine: str, workers: int, buffer: int | None) -> Run:
    work = w1()
    settings = Settings(
        rounds=1_000_000,
        clients_per_round=work.clients_per_round,
        local_steps=work.local_steps,
        batch_size=work.batch_size,
        engine=engine,
        workers=workers,
        device="cpu",
        devices=DEVICES,
        asynchronous=None if buffer is None else {"buffer": buffer, "concurrency": IN_FLIGHT},
    )
    torch.manual_seed(0)
    return Run(algorithm, work.model(), work.data, settings)


def held(run: Run) -> str:
    """What a run holds besides the server."""
    assert isinstance(run.trainer, AsynchronousTrainer)
    under_way = run.trainer.underway
    tensors = [
        value
        for began in under_way.versions.values()
        for value in (began.weights, began.buffers, *began.shared.values())
    ]
    tensors += [
        v
        for row in under_way.held.values()
        for v in (*row.update.values.values(), *row.update.kept.values())
    ]
    size = sum(tensor.nbytes for tensor in tensors) / run.server.weights.nbytes
    counts = f"{len(under_way.versions)} versions and {len(under_way.held)} updates"
    return f"{counts}, {size:.0f} times the weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="vectorised")
    arguments = parser.parse_args()
    for algorithm in (FedAvg(client_lr=0.05), PreFed()):
        runs = {
            buffer: make_run(algorithm, arguments.engine, arguments.workers, buffer)
            for buffer in (None, 100, 50, 10)
        }
        start = time.perf_counter()
        for run in runs.values():
            for _ in range(12):  # until as many versions are in use as will be
                run.run_round()

        def updates(run: Run, buffer: int | None) -> None:
            for _ in range(IN_FLIGHT // (buffer or IN_FLIGHT)):
                run.run_round()

        rounds = {str(b): (lambda run=run, b=b: updates(run, b)) for b, run in runs.items()}
        times = interleaved(rounds, arguments.passes)
        whole = times.pop("None")
        name = type(algorithm).__name__
        print(f"{name}, {runs[None].trainer.engine}: synchronous {IN_FLIGHT / whole:.0f} updates/s")
        for buffer, seconds in times.items():
            print(
                f"  buffer {buffer:>3}: {IN_FLIGHT / seconds:.0f} updates/s, {whole / seconds:.2f} "
                f"of synchronous; holds {held(runs[int(buffer)])}"
            )
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
