"""engine = "auto": measure the candidates on the real model and data, and take the fastest.

The measurements train on clients of the first cohort and throw the updates away, so a run is to the
last bit what it would have been had the choice been made by hand. Another machine, or a busy
moment, may lead to another choice: then results agree to rounding, as those of any two engines.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.training.engines.engine import train_block
from prefed.training.engines.vectorised import Vectorised
from prefed.training.engines.workers import Workers
from prefed.training.round import Kept, Server
from prefed.training.settings import Settings
from prefed.training.task import Task

log = logging.getLogger("prefed")

SHORT = 10_000_000
"""Runs that change fewer weights than this in all are over before a measurement would be."""
BLOCKS, STEPS = 2, 3
"""How many blocks each worker of a candidate is timed on, and for how many steps."""
BRIEF = 0.25
"""Seconds of a round that is timed with all its steps: where clients are small, what is done once
a round decides."""
PASSES, MOST_PASSES, SECONDS = 2, 8, 3.0
"""At least twice, and up to eight times while that takes less than three seconds in all."""
HOPELESS = 1.5
"""A candidate this many times slower than the best is not measured again: the time is for those
that are close."""
MARGIN = 0.95
"""A candidate must beat the best of those before it by this factor."""


@dataclass(frozen=True)
class Choice:
    """How a run computes. A resumed run takes the choice of the run it continues."""

    engine: str
    workers: int

    def __str__(self) -> str:
        return f"{self.engine} x {self.workers}"

    @classmethod
    def parse(cls, text: str) -> "Choice":
        engine, _, workers = text.rpartition(" x ")
        return cls(engine, int(workers))


def choose(
    task: Task,
    data: FederatedData,
    settings: Settings,
    algorithm: Algorithm,
    server: Server,
    cohort: Sequence[int],
    kept: Kept,
) -> Choice:
    """The choice for a run; one line in the log says what it was and why."""
    if settings.engine != "auto":
        return Choice(settings.engine, settings.workers)
    work = settings.rounds * settings.local_steps * len(cohort) * task.flat.layout.size
    if work < SHORT:
        return Choice("sequential", settings.workers)
    found = candidates(task, data, settings, algorithm, len(cohort))
    if len(found) == 1:
        return found[0]

    def prepare(steps: int) -> dict[Choice, Workers]:
        brief = settings.model_copy(update={"local_steps": steps})
        return {c: Workers(c.engine, c.workers, task, data, brief) for c in found}

    def measure(choice: Choice) -> float:
        pool = pools[choice]
        blocks = pool.blocks(algorithm, cohort)[: BLOCKS * choice.workers]
        train = partial(train_block, algorithm, server, kept, settings.seed)
        start = time.perf_counter()
        for _ in pool.updates(train, blocks):
            pass
        clients = sum(len(clients) for _, clients in blocks)
        return (time.perf_counter() - start) / (clients * steps)

    steps = min(STEPS, settings.local_steps)
    pools = prepare(steps)
    quickest = min(measure(choice) for choice in found)  # also fills caches and allocates memory
    if quickest * settings.local_steps * len(cohort) < BRIEF:
        steps = settings.local_steps
        pools = prepare(steps)
    times = dict.fromkeys(found, math.inf)
    close, began = found, time.perf_counter()
    for done in range(MOST_PASSES):
        if len(close) == 1 or (done >= PASSES and time.perf_counter() - began > SECONDS):
            break
        for choice in close:  # in turn: a busy moment hits all of them
            times[choice] = min(times[choice], measure(choice))
        close = [c for c in close if times[c] < HOPELESS * min(times.values())]
    best = found[0]
    for choice in found[1:]:
        if times[choice] < MARGIN * times[best]:
            best = choice
    measured = "; ".join(f"{choice} {1e3 * t:.3g}" for choice, t in times.items())
    log.info("engine: %s, the fastest measured (ms per local step: %s)", best, measured)
    return best


def candidates(
    task: Task, data: FederatedData, settings: Settings, algorithm: Algorithm, cohort: int
) -> list[Choice]:
    """What is worth measuring, the safest first. `workers` says how many cores a run may use;
    without it a run uses as many as torch does."""
    workers = [settings.workers]
    threads = torch.get_num_threads()
    shared = cohort > 1 and not algorithm.client_rule().lockstep and task.device.type == "cpu"
    if workers == [1] and threads > 1 and shared and task.randomness != "generator":
        workers.append(min(threads, cohort))
    engines = ["sequential"]
    if cohort > 1:
        vectorised = Vectorised(task, data, settings)
        if vectorised.most_clients > 1 and vectorised.why_not() is None:
            engines.append("vectorised")
    # Small operations of many clients suffer most from threads that wait for each other inside
    # them, above all on a busy machine: there one core per block stands first.
    found = [Choice(engines[0], count) for count in workers]
    return found + [Choice(engine, count) for engine in engines[1:] for count in workers[::-1]]
