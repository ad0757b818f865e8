"""Two ranks of torchrun against one, each with one thread, on W2 and W3.

    python bench/ranks.py

The two kinds of run take turns. Printed are the medians of their rounds, the speed-up, and whether
the final weights have the same bits. They run in a network of their own: torchrun listens on all
interfaces.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time

import torch

from prefed import FedAvg
from prefed.bench.ratios import simulation
from prefed.bench.workloads import WORKLOADS
from prefed.core import private_network
from prefed.core.errors import PrefedError
from prefed.training import ranks

ROUNDS, PASSES = 6, 3


def rank(name: str) -> None:
    torch.set_num_threads(1)
    with ranks.joined() as speaks:
        run = simulation(WORKLOADS[name](), FedAvg(client_lr=0.05), "sequential", 1)
        times, start = [], time.perf_counter()
        for _ in run.rounds(until=1 + ROUNDS):
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        if speaks:
            bits = hashlib.sha256(run.server.weights.numpy().tobytes()).hexdigest()
            print(json.dumps({"seconds": times[1:], "bits": bits}))


def main() -> None:
    try:
        python = private_network.inside(sys.executable)
    except PrefedError as error:
        print(f"ranks: left out, {error}, and torchrun listens on all interfaces")
        return
    launch = [*python, "-m", "torch.distributed.run", "--standalone"]
    for name in ("W2", "W3"):
        times: dict[int, list[float]] = {1: [], 2: []}
        bits = set()
        for _ in range(PASSES):
            for count, found in times.items():
                command = [*launch, f"--nproc-per-node={count}", __file__, name]
                line = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
                report = json.loads(line)
                found += report["seconds"]
                bits.add(report["bits"])
        one, two = (statistics.median(times[count]) for count in (1, 2))
        print(
            f"{name}: 1 rank {one:.3f} s a round, 2 ranks {two:.3f} s: {one / two:.2f} times as "
            f"fast; {'the same bits' if len(bits) == 1 else 'OTHER BITS'}",
            flush=True,
        )


if __name__ == "__main__":
    rank(sys.argv[1]) if len(sys.argv) > 1 else main()
