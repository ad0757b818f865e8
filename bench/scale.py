"""A round's time and memory from a thousand clients to a million, at a cohort of 100 (W1).

    python bench/scale.py

Every client has 20 samples of a pool that does not grow, so that what is measured is the cost of a
client and not of its data. Times are of rounds in turn in one process; memory is the peak of a
process of its own for each size.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import numpy as np
import torch

from prefed import FedAvg
from prefed.bench.ratios import interleaved, peak, simulation
from prefed.bench.workloads import Workload, w1
from prefed.data import FederatedData, Partition
from prefed.data.partition import Parts
from prefed.training.run import Run

SIZES = (1_000, 10_000, 100_000, 1_000_000)
EACH = 20


def workload(clients: int) -> Workload:
    small = w1(1000)
    pool = small.data.clients.whole
    order = np.resize(np.arange(len(pool)), clients * EACH)
    parts = Parts(order, np.arange(1, clients + 1) * EACH)
    data = FederatedData(Partition(pool.x, pool.y, parts))
    return Workload(small.title, small.model, data, 100, 10, EACH)


def start(clients: int) -> Run:
    run = simulation(workload(clients), FedAvg(client_lr=0.05), "vectorised", 2)
    run.run_round()
    return run


def main() -> None:
    if len(sys.argv) > 1:
        run = start(int(sys.argv[1]))
        for _ in run.rounds(until=6):
            pass
        print(peak())
        return
    torch.set_num_threads(2)
    memory = {}
    for clients in SIZES:
        command = [sys.executable, __file__, str(clients)]
        found = [float(subprocess.check_output(command, text=True)) for _ in range(3)]
        memory[clients] = statistics.median(found)
    runs = {str(clients): start(clients) for clients in SIZES}
    times = interleaved({name: run.run_round for name, run in runs.items()}, 31)
    first = SIZES[0]
    print("clients     s a round   ratio   peak MB   bytes a client more")
    for clients in SIZES:
        more = (
            (memory[clients] - memory[first]) * 2**20 / (clients - first) if clients > first else 0
        )
        seconds = times[str(clients)]
        print(
            f"{clients:>9,}   {seconds:9.4f}   {seconds / times[str(first)]:5.2f}"
            f"   {memory[clients]:7.0f}   {more:8.0f}"
        )


if __name__ == "__main__":
    main()
