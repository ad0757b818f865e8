"""Kept state beyond memory: rounds of 1,000 of a million clients that keep 10,000 weights each.

    python bench/kept.py                        # 40 GB on disk, filled first; some minutes
    python bench/kept.py --clients 50000        # 2 GB
    TMPDIR=/elsewhere python bench/kept.py      # on another disk

PreFed(momentum="keep"). Every client has taken part before, so each one of a cohort is read and
written. Beside it runs the same federation with fewer clients and kept state in memory; rounds take
turns in one process, and medians are told. Checkpoints are those of a run directory. The directory
is removed at the end, and when the script is interrupted.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import prefed
from prefed.data import FederatedData, Partition
from prefed.data.partition import Parts
from prefed.experiments import checkpoints
from prefed.training.local_trainer import LocalTrainer

INPUTS, HIDDEN, CLASSES, EACH = 89, 100, 10, 20
Times = tuple[float, float]
"""Seconds by the clock, and of the processor."""


def start(clients: int, cohort: int, where: str, folder: Path | None, engine: str) -> prefed.Run:
    torch.manual_seed(0)
    pool = torch.randn(20_000, INPUTS), torch.randint(CLASSES, (20_000,))
    order = np.resize(np.arange(20_000), clients * EACH)
    data = FederatedData(Partition(*pool, Parts(order, np.arange(1, clients + 1) * EACH)))
    layers = nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    settings = prefed.Settings(
        rounds=10_000, clients_per_round=cohort, local_steps=10, batch_size=EACH, engine=engine,
        kept_state=where, device="cpu",
    )  # fmt: skip
    algorithm = prefed.PreFed(client_lr=0.01, momentum="keep")
    run = prefed.Run(algorithm, nn.Sequential(*layers), data, settings)
    run.trainer.folder = folder
    run.prepare()
    return run


def fill(run: prefed.Run) -> Times:
    """All clients have taken part."""
    assert isinstance(run.trainer, LocalTrainer)
    first = run.trainer.first_kept
    noise = {name: torch.randn(2, value.numel()) * 1e-3 for name, value in first.items()}

    def put() -> None:
        for start in range(0, len(run.data), 1000):
            block = range(start, min(start + 1000, len(run.data)))
            kept = {
                c: {n: noise[n][0].add(noise[n][1], alpha=c % 997).view(v.shape) for n, v in
                    first.items()} for c in block
            }  # fmt: skip
            run.kept.put(0, kept)

    return timed(put)


def timed(what: Callable[[], object]) -> Times:
    start, used = time.perf_counter(), time.process_time()
    what()
    return time.perf_counter() - start, time.process_time() - used


def checkpoint(run: prefed.Run, folder: Path) -> None:
    tensors = run.snapshot()
    saved = checkpoints.Checkpoint(run.server.round, tensors, "\n" * run.server.round, "")
    checkpoints.save(folder / "checkpoints", "bench", saved)
    run.trainer.saved(run.server.round)


def median(times: list[Times]) -> str:
    clock, used = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{clock:8.3f} s   {used:8.3f} s of the processor"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--in-memory", type=int, default=20_000, help="clients of the other run")
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--engine", default="vectorised")
    parser.add_argument("--empty", action="store_true", help="nobody has taken part before")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prefed-kept-"))
    try:
        measure(given, folder)
    finally:
        shutil.rmtree(folder)


def measure(given: argparse.Namespace, folder: Path) -> None:
    (folder / "disk").mkdir()
    make = given.cohort, given.engine
    memory = start(given.in_memory, make[0], "memory", None, make[1])
    disk = start(given.clients, make[0], "disk", folder / "disk", make[1])
    size = sum(value.nbytes for value in disk.trainer.first_kept.values())
    print(f"{given.clients:,} clients x {size:,} bytes = {given.clients * size / 1e9:.1f} GB")
    if not given.empty:
        fill(memory)
        took, used = fill(disk)
        rate = given.clients * size / took / 1e6
        print(f"filled in {took:.0f} s ({used:.0f} of the processor): {rate:.0f} MB/s")
    rounds: dict[str, list[Times]] = {"memory": [], "disk": []}
    saving: dict[str, list[Times]] = {"memory": [], "disk": []}
    for number in range(given.rounds):
        for name, run in (("memory", memory), ("disk", disk)):
            rounds[name].append(timed(run.run_round))
            if number % 5 == 4:
                saving[name].append(timed(lambda run=run, at=folder / name: checkpoint(run, at)))
    for name, clients in (("memory", given.in_memory), ("disk", given.clients)):
        print(f"round,      {name:6} ({clients:>9,} clients): {median(rounds[name][1:])}")
        if saving[name]:
            print(f"checkpoint, {name:6} ({clients:>9,} clients): {median(saving[name])}")
    ratios = [
        statistics.median(d[i] / m[i] for m, d in zip(*rounds.values(), strict=True))
        for i in (0, 1)
    ]
    print(f"disk over memory: {ratios[0]:.2f} by the clock, {ratios[1]:.2f} of the processor")
    records = folder / "disk" / "kept.records"
    print(f"file: {records.stat().st_blocks * 512 / 1e9:.2f} GB on disk; ", end="")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
