"""What the virtual clock costs: of a round of W1, and in bytes and time for a million devices.

    python bench/devices.py

A round with a clock and one without take turns in one process. Bytes are the most that the arrays
of NumPy hold at a time, over the number of devices, while the times of all are computed.
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import torch

from prefed import Devices, FedAvg, Run
from prefed.bench.ratios import interleaved, simulation
from prefed.bench.workloads import w1
from prefed.training.clock import Clock
from prefed.training.distributions import Lognormal

ROUNDS, DEVICES = 201, 1_000_000


def spread(median: float) -> Lognormal:
    return Lognormal(median=median, sigma=1.0)


LOGNORMAL = Devices(
    steps_per_second=spread(100.0), up=spread(1e6), down=spread(4e6), latency=spread(0.05)
)
PHONES = Devices(
    classes={"phone": 0.7, "laptop": 0.2, "edge": 0.1}, over_selection=1.3, deadline=60.0,
    partial_work=True, vanish=0.05,
)  # fmt: skip


def start(devices: Devices | None) -> Run:
    run = simulation(w1(), FedAvg(client_lr=0.05), "vectorised", 2)
    if devices is not None:
        settings = run.settings.model_copy(update={"devices": devices})
        run.settings = settings
        run.clock = Clock(devices, run.algorithm, run.task, run.data, settings)
    run.run_round()
    return run


def main() -> None:
    torch.set_num_threads(2)
    kinds = {"no clock": None, "lognormal": LOGNORMAL, "classes, all options": PHONES}
    runs = {name: start(devices) for name, devices in kinds.items()}
    # With over-selection a cohort of 100 is drawn from 130: as many clients train.
    times = interleaved({name: run.run_round for name, run in runs.items()}, ROUNDS)
    print(f"{'W1':<22} s a round    more")
    for name, seconds in times.items():
        print(f"{name:<22} {seconds:9.5f}  {100 * (seconds / times['no clock'] - 1):5.1f} %")
    for name in ("lognormal", "classes, all options"):
        run = runs[name]
        assert run.clock is not None
        clock, cohort, server = run.clock, run.draw_cohort(), replace(run.server)
        begun = time.perf_counter()
        for _ in range(200):
            clock.close(server, 0.0, cohort, cohort)
        took = (time.perf_counter() - begun) / 200
        print(f"{name}: the clock alone {1e3 * took:.3f} ms, "
              f"{100 * took / times['no clock']:.2f} % of a round")  # fmt: skip
    everyone = np.arange(DEVICES)
    for name, devices in (("lognormal", LOGNORMAL), ("classes", PHONES)):
        tracemalloc.start()
        begun = time.perf_counter()
        devices.seconds(0, 0, everyone, 38_440, 10, 38_440, 200, 2e4)
        took = time.perf_counter() - begun
        most = tracemalloc.get_traced_memory()[1] / DEVICES
        tracemalloc.stop()
        print(f"{DEVICES:,} devices, {name}: {most:.0f} bytes a device at most, {took:.2f} s")


if __name__ == "__main__":
    main()
