"""engine = "auto": measure the candidates on the real model and data, and take the fastest.

The measurements train on clients of the first cohort and throw the updates away, so a run is to the
last bit what it would have been had the choice been made by hand. Another machine, or a busy
moment, may lead to another choice: then results agree to rounding, as those of any two engines.
"""

import logging
import math
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.machine import threads_for, torch_threads, usable_threads
from prefed.data import FederatedData
from prefed.rules import Rule, State
from prefed.rules.rule import in_c
from prefed.rules.wrapped import Wrapped
from prefed.training.batches import local_steps
from prefed.training.engines.engine import train_block
from prefed.training.engines.native import Native
from prefed.training.engines.native_writing import NotNative
from prefed.training.engines.vectorised import Vectorised
from prefed.training.engines.workers import Workers
from prefed.training.server_state import Kept, Server
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
BRIEF_RUN = 4.0
"""Seconds of a run that is not worth trying more workers than are set."""
PASSES, MOST_PASSES, SECONDS = 2, 8, 3.0
"""At least twice (a brief run once), and up to eight times while that takes less than three seconds
in all, and less than a twentieth of the run."""
HOPELESS = 1.5
"""A candidate this many times slower than the best is not measured again: the time is for those
that are close."""
SLOW_START = 5.0
"""The same for the first two times: one also allocates memory, one may meet a busy moment."""
MARGIN = 0.95
"""A candidate must beat the best of those before it by this factor."""

MEASURED = ("sequential", "vectorised", "native")
"""The engines that "auto" chooses from."""
WORTH_COMPILING = 5.0
"""A run has to last this many times as long as compiling a C program takes, which is some
seconds."""


@dataclass(frozen=True)
class Choice:
    """How a run computes. A resumed run takes the choice of the run it continues."""

    engine: str
    workers: int
    threads: int | None = 1
    """For each operation of a single worker; several have one each. None leaves it to torch, as
    earlier versions did."""

    def __str__(self) -> str:
        text = f"{self.engine} x {self.workers}"
        if self.workers > 1 or self.threads is None:
            return text
        return f"{text} with {self.threads} thread{'s' if self.threads > 1 else ''}"

    @classmethod
    def parse(cls, text: str) -> "Choice":
        match = re.fullmatch(r"(.+) x ([1-9]\d{0,3})(?: with ([1-9]\d{0,3}) threads?)?", text)
        if match is None:
            raise ValueError(f"{text!r} says no engine and number of workers")
        engine, workers, threads = match.groups()
        alone = 1 if int(workers) > 1 else None
        return cls(engine, int(workers), int(threads) if threads else alone)


def choose(race: "Race") -> Choice:
    """The choice for a run; one line in the log says what it was and why."""
    task, data, settings, cohort = race.task, race.data, race.settings, race.cohort
    threads = 1 if settings.workers > 1 else threads_of(task, data, settings)
    if settings.engine != "auto":
        return Choice(settings.engine, settings.workers, threads)
    in_round = sum(local_steps(settings, data, cohort))
    work = settings.rounds * in_round * task.flat.layout.size
    if work < SHORT:
        return Choice("sequential", settings.workers, threads)
    found = candidates(task, data, settings, race.algorithm, len(cohort))
    native = native_of(task, data, settings)
    if len(found) == 1 and native is None:
        return found[0]
    times = race.times(found, in_round, native)
    best = next(iter(times))
    for choice, seconds in times.items():
        if seconds < MARGIN * times[best]:
            best = choice
    measured = "; ".join(f"{choice} {1e3 * t:.3g}" for choice, t in times.items())
    log.info("engine: %s, the fastest measured (ms per local step: %s)", best, measured)
    return best


@dataclass
class Race:
    """What a run could compute with, timed against each other on clients of its first cohort."""

    task: Task
    data: FederatedData
    settings: Settings
    algorithm: Algorithm
    server: Server
    cohort: Sequence[int]
    kept: Kept
    steps: int = field(default=0, init=False)
    """Of each client that is timed; 0: all that it takes in a round."""
    pools: dict[Choice, Workers] = field(default_factory=dict, init=False)

    def times(
        self, found: list[Choice], in_round: int, native: Native | None
    ) -> dict[Choice, float]:
        """Seconds per local step of each candidate. The program in C is one more, if a run is long
        enough for it to be compiled.

        in_round   the local steps of all clients of a round
        """
        self.steps, quickest = min(STEPS, in_round // len(self.cohort)), math.inf
        alone = [choice for choice in found if choice.workers == self.settings.workers]
        for choice in alone:  # also fills caches and allocates memory
            quickest = min(quickest, self.measure(choice, SLOW_START * quickest))
        a_round = quickest * in_round
        a_run = a_round * self.settings.rounds
        if a_run < BRIEF_RUN:
            found = [*alone]
        compiling = math.inf if native is None else native.program.compiling
        if a_run > WORTH_COMPILING * compiling and native is not None and native.why_not() is None:
            found += [Choice("native", choice.workers) for choice in found[::-1]
                      if choice.engine == "sequential"]  # fmt: skip
        for choice in found:
            if choice not in alone:
                self.measure(choice, SLOW_START * quickest)
        if a_round < BRIEF:
            self.steps, self.pools = 0, {}
        return self._in_turn(found, a_run)

    def _in_turn(self, found: list[Choice], a_run: float) -> dict[Choice, float]:
        """The best of several passes, over fewer and fewer candidates. A run lasts `a_run` seconds,
        about."""
        passes = PASSES if a_run > BRIEF_RUN else 1
        times = dict.fromkeys(found, math.inf)
        close, began = found, time.perf_counter()
        for done in range(MOST_PASSES):
            if len(close) == 1 or (
                done >= passes and time.perf_counter() - began > min(SECONDS, a_run / 20)
            ):
                break
            for choice in close:  # in turn: a busy moment hits all of them
                factor = SLOW_START if math.isinf(times[choice]) else HOPELESS
                seconds = self.measure(choice, factor * min(times.values()))
                times[choice] = min(times[choice], seconds)
            close = [c for c in close if times[c] < HOPELESS * min(times.values())]
        return times

    def measure(self, choice: Choice, most: float = math.inf) -> float:
        """Seconds per local step; infinity, and no more work, once it is sure to be over `most`."""
        settings, data = self.settings, self.data
        brief = settings.with_steps(self.steps) if self.steps else settings
        if choice not in self.pools:
            self.pools[choice] = Workers(choice.engine, choice.workers, self.task, data, brief)
        pool = self.pools[choice]
        blocks = pool.blocks(self.algorithm, self.cohort)[: BLOCKS * choice.workers]
        count = sum(sum(local_steps(brief, data, clients)) for _, clients in blocks)
        start = time.perf_counter()
        watched = until(self.algorithm, start + most * count)
        train = partial(train_block, watched, self.server, self.kept, settings.seed)
        with torch_threads(choice.threads), closing(pool.updates(train, blocks)) as updates:
            try:
                for _ in updates:
                    if time.perf_counter() - start > most * count:
                        return math.inf
            except Late:
                return math.inf
        return (time.perf_counter() - start) / count


class Late(Exception):
    """A local update was broken off: it takes too long to be the fastest."""


@dataclass(frozen=True)
class Timed(Wrapped):
    """A client rule whose steps end with Late from a moment on."""

    end: float

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        if time.perf_counter() > self.end:
            raise Late
        self.rule.apply(w, g, state, lr, k)

    def in_c(self) -> str | None:
        return in_c(self.rule)  # it is not broken off, and need not be


def until(algorithm: Algorithm, end: float) -> Algorithm:
    """The algorithm, with local updates that are broken off between two steps once it is late."""
    if math.isinf(end):
        return algorithm

    def in_turns(rule: Rule, shared: int) -> Rule:
        return Timed(algorithm.in_turns(rule, shared), end)

    watched = algorithm.model_copy()
    watched.__dict__["in_turns"] = in_turns  # of this copy alone, whatever its class
    return watched


def candidates(
    task: Task, data: FederatedData, settings: Settings, algorithm: Algorithm, cohort: int
) -> list[Choice]:
    """What is worth measuring, the safest first. `workers` says how many cores a run may use;
    without it a run uses as many as torch does, if they are there."""
    workers, threads = [settings.workers], usable_threads()
    alone = threads_of(task, data, settings)
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
    found = [(engines[0], count) for count in workers]
    found += [(engine, count) for engine in engines[1:] for count in workers[::-1]]
    return [Choice(engine, count, 1 if count > 1 else alone) for engine, count in found]


def native_of(task: Task, data: FederatedData, settings: Settings) -> Native | None:
    """The engine that writes C, if it can have the model; nothing is compiled yet."""
    try:
        return Native(task, data, settings)
    except NotNative:
        return None


def threads_of(task: Task, data: FederatedData, settings: Settings) -> int | None:
    """For each operation of a local step: one, unless the model is large."""
    if task.device.type != "cpu" or settings.engine not in ("auto", *MEASURED):
        return None  # the compiled engine and those of one's own use threads as they like
    return threads_for(3 * task.operations(data) * (settings.batch_size or len(data.client(0))))
