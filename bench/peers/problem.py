"""The two workloads, for every framework the same: data in NumPy, models in torch or JAX.

Nothing of prefed is imported here: each framework runs in an environment of its own.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LR, BATCH, STEPS = 0.05, 20, 10


@dataclass(frozen=True)
class Problem:
    clients: int
    per_round: int
    samples: int
    shape: tuple[int, ...]
    classes: int

    @property
    def epochs(self) -> int:
        """So many passes over a client's samples are STEPS batches."""
        return STEPS * BATCH // self.samples

    def data(self) -> tuple[Any, Any]:
        """x (clients, samples, ...) and y (clients, samples): noise, which costs what data do."""
        random = np.random.default_rng(0)
        x = random.standard_normal((self.clients, self.samples, *self.shape), dtype=np.float32)
        return x, random.integers(self.classes, size=(self.clients, self.samples))

    def torch_model(self) -> Any:
        from torch import nn

        if len(self.shape) == 1:
            return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, self.classes))
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, self.classes),
        )  # fmt: skip


PROBLEMS = {
    "W1": Problem(1000, 100, 20, (64,), 10),
    "W2": Problem(200, 20, 100, (1, 28, 28), 62),
}


TURN = 0.5
"""Seconds that a turn lasts at least: a round that is over at once would measure the waking up."""


def serve(run_round: Callable[[], object]) -> None:
    """Answer each line on standard input with the seconds of a round, and the peak memory."""
    turns, more = Turns(), True
    while more:
        run_round()
        more = turns()


class Turns:
    """Called after each round, also from a framework's own loop: at the end of a turn it reports
    the mean over its rounds, and waits for the next turn."""

    def __init__(self, warm_up: int = 3) -> None:
        self.warm_up = warm_up  # what is set up or compiled once is not measured
        self.rounds, self.start = 0, 0.0

    def __call__(self) -> bool:
        """False if there is no other turn."""
        self.rounds += 1
        seconds = time.perf_counter() - self.start
        if self.rounds < self.warm_up or (not self.warm_up and seconds < TURN):
            return True
        report(**({"ready": True} if self.warm_up else {"seconds": seconds / self.rounds}))
        more = bool(sys.stdin.readline())
        self.warm_up, self.rounds, self.start = 0, 0, time.perf_counter()
        return more


def report(**values: Any) -> None:
    me, children = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    peak = sum(resource.getrusage(who).ru_maxrss for who in (me, children)) / 1024
    print("\n" + json.dumps(values | {"peak_mb": peak}), flush=True)
