"""The time of each mean over a cohort, on one core: python bench/means.py [CLIENTS [WEIGHTS]]."""

from __future__ import annotations

import sys
import time

import torch

from prefed.training.means import MEANS


def main(clients: int = 100, weights: int = 1_000_000) -> None:
    torch.set_num_threads(1)
    rows = [*torch.randn(clients, weights, generator=torch.Generator().manual_seed(0))]
    print(f"{clients} clients, {weights} weights, one core: seconds, the best of three")
    for name in MEANS.names():
        rule, times = MEANS.get(name)(), []
        for _ in range(3):
            start = time.perf_counter()
            rule.mean(rows, [1.0] * clients)
            times.append(time.perf_counter() - start)
        print(f"{name:12} {min(times):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
