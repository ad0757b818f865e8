"""Much of everything: a million clients, a thousand rounds. Nothing may pile up."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

import prefed
from prefed.core import draws
from prefed.data.dataset import Dataset, partition
from prefed.experiments import run_directory
from prefed.experiments.config import load
from prefed.training.trainer import Record
from tests.faults.trials import fault, scratch


def memory() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


class Watch(prefed.Callback):
    """Memory and open files after each tenth of a run."""

    def __init__(self, rounds: int) -> None:
        self.every = max(1, rounds // 10)
        self.seen: list[tuple[int, int]] = []

    def on_round(self, record: Record) -> None:
        if record["round"] % self.every == 0:
            self.seen.append((memory(), handles()))


@fault("a thousand rounds: memory and open files", times=3, quick=1, seconds=60)
def rounds(times: int, rng: random.Random) -> Iterator[str]:
    """With a directory and a checkpoint after every round, in each engine."""
    run_directory.SECONDS_BETWEEN = 0.0
    count = 1000 if times > 1 else 100
    engines = [("sequential", 1), ("vectorised", 1), ("sequential", 2)]
    with scratch() as root:
        for engine, workers in engines[:times]:
            changes = [f"rounds={count}", "local_steps=1", "model.hidden=[1024]", "device=cpu"]
            changes += ["clients_per_round=4", "algorithm=prefed", "evaluate_every=100"]
            config = load("digits-noniid", [*changes, f"engine={engine}", f"workers={workers}"])
            watch = Watch(count)
            run_directory.execute(config, root / f"{engine}{workers}", callbacks=[watch])
            # A vector has 300 kB: one kept in each round would be 20 MB after a hundred. The
            # history, a kilobyte a round, is meant to grow.
            early, late = watch.seen[2], watch.seen[-1]
            grown = late[0] - early[0]
            # A thread may just be writing a checkpoint; a file that stays open is there each time.
            parts = watch.seen[2:5], watch.seen[-3:]
            before, after = (min(handles for _, handles in part) for part in parts)
            if grown > 10e6:
                yield f"{engine} x {workers}: {grown / 1e6:.1f} MB more after {count} rounds"
            elif after > before:
                yield f"{engine} x {workers}: {after - before} more open files"
            else:
                yield ""


class Lazy:
    """A million clients, made when they are asked for."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch_rng = torch.Generator().manual_seed(client)
        return torch.randn(8, 5, generator=torch_rng), torch.arange(8) % 3


@fault("a million clients: memory", times=3, quick=1, seconds=30)
def clients(times: int, rng: random.Random) -> Iterator[str]:
    """Made on demand, and with state that each keeps; then a split of data in memory."""
    for name in ("scaffold", "prefed")[:times]:
        before = memory()
        settings = prefed.Settings(
            rounds=20, local_steps=1, clients_per_round=100, batch_size=4, device="cpu"
        )
        algorithm = prefed.ALGORITHMS.get(name)()
        data = prefed.FederatedData(Lazy())
        simulation = prefed.Simulation(algorithm, torch.nn.Linear(5, 3), data, settings)
        for _ in range(20):
            simulation.run_round()
        grown = memory() - before
        # 2,000 clients were met: what they keep is a few vectors of 18 numbers each.
        yield f"{name}: {grown / 1e6:.0f} MB" if grown > 100e6 else ""
    if times > 2:
        x, y = torch.zeros(1_000_000, 2), torch.arange(1_000_000) % 2
        before = memory()
        dataset = Dataset(x, y, (x[:9], y[:9]))
        generator = draws.generator(0, "split")
        data = partition(dataset, prefed.SPLITS.get("iid"), generator, {"clients": 1_000_000})
        settings = prefed.Settings(
            rounds=3, local_steps=1, clients_per_round=50, batch_size=1, device="cpu"
        )
        simulation = prefed.Simulation(prefed.FedAvg(), torch.nn.Linear(2, 2), data, settings)
        for _ in range(3):
            simulation.run_round()
        grown = memory() - before
        yield f"a split of a million samples: {grown / 1e6:.0f} MB" if grown > 300e6 else ""
