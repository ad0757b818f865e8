"""Rounds of prefed and of the bare loops in turn, so that a busy moment of the machine hits all."""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from prefed.algorithms import Algorithm
from prefed.algorithms.fedavg import FedAvg
from prefed.algorithms.prefed import PreFed
from prefed.bench.bare import LR, Alone, Processes, Threads, synchronise
from prefed.bench.workloads import WORKLOADS, Workload
from prefed.core.machine import torch_threads
from prefed.experiments.config import Config
from prefed.training.run import Run
from prefed.training.settings import Settings

Round = Callable[[], object]


@dataclass(frozen=True)
class How:
    """How a workload is run, besides in bare loops.

    engines  each in turn
    beside   busy processes
    """

    passes: int = 5
    engines: Sequence[str] = ("auto",)
    workers: int = 1
    beside: int = 0
    device: str = "cpu"

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"


HEAD = (
    "| | best bare loop | prefed | FedAvg, of the best bare loop | PreFed, of FedAvg |",
    "|---|---|---|---|---|",
)
"""Of the table of all workloads."""


@dataclass
class Measured:
    """Median seconds of a round: of the bare loops, and of FedAvg and PreFed on each engine."""

    name: str
    title: str
    bare: dict[str, float]
    ours: list[tuple[str, float, float]] = field(default_factory=list)
    """How it was computed, FedAvg and PreFed."""
    single: float | None = None
    """FedAvg with one thread in all."""

    def lines(self) -> Iterator[str]:
        best = min(self.bare.values())
        yield self.title
        yield "  seconds a round, and as a share of the best bare loop"
        for label, seconds in self._seconds():
            yield f"  {label:<58} {seconds:8.4f}  {seconds / best:6.2f}"
        for how, fedavg, prefed in self.ours:
            yield f"  PreFed / FedAvg ({how}) {prefed / fedavg:.2f}"
            if self.single is not None:
                yield f"  FedAvg ({how}) / FedAvg with one thread in all {fedavg / self.single:.2f}"
        yield f"  peak memory of this process {peak():.0f} MB"

    def _seconds(self) -> Iterator[tuple[str, float]]:
        for label, seconds in self.bare.items():
            yield f"bare loop, {label}", seconds
        for how, fedavg, prefed in self.ours:
            yield f"prefed FedAvg ({how})", fedavg
            yield f"prefed PreFed ({how})", prefed
        if self.single is not None:
            yield "one thread in all, FedAvg", self.single

    def rows(self) -> Iterator[str]:
        """Of the table of all workloads."""
        best, label = min((seconds, label) for label, seconds in self.bare.items())
        for how, fedavg, prefed in self.ours:
            ratios = f"{fedavg / best:.2f} | {prefed / fedavg:.2f}"
            yield f"| {self.name} | {best:.3g} s ({label}) | {how} | {ratios} |"


def simulation(
    work: Workload, algorithm: Algorithm, engine: str, workers: int, device: str = "cpu"
) -> Run:
    settings = Settings(
        rounds=1_000_000,
        clients_per_round=work.clients_per_round,
        local_steps=work.local_steps,
        batch_size=work.batch_size,
        engine=engine,
        workers=workers,
        device=device,
    )
    torch.manual_seed(0)
    run = Run(algorithm, work.model(), work.data, settings)
    run.run_round()  # chooses the engine, and compiles
    return run


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes beside this one that never rest."""
    spin = (sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def bench(name: str, how: How) -> Measured:
    """A workload in every bare loop and on every engine."""
    work, cores, fedavg = WORKLOADS[name](), max(2, torch.get_num_threads()), FedAvg(client_lr=LR)
    beside = f", beside {how.beside} busy processes" if how.beside else ""
    with ExitStack() as stack:
        stack.enter_context(neighbours(how.beside))
        threads = Threads(work, cores, how.device)
        stack.callback(threads.close)
        bare: dict[str, Round] = {"one client at a time": Alone(work, how.device).round}
        bare[f"{cores} threads"] = threads.round
        if how.on_cpu:
            others = Processes(name, work, cores)
            stack.callback(others.close)
            bare[f"{cores} processes"] = others.round
        rounds, engines = dict(bare), []
        for engine in how.engines:
            pair = [
                simulation(work, algorithm, engine, how.workers, how.device)
                for algorithm in (fedavg, PreFed())
            ]
            labels = [f"{engine}: {type(run.algorithm).__name__}" for run in pair]
            rounds |= {label: run.run_round for label, run in zip(labels, pair, strict=True)}
            used = sorted({run.trainer.engine for run in pair})
            engines.append((" and ".join(used), *labels))
        if how.on_cpu:
            with torch_threads(1):
                rounds["single"] = simulation(work, fedavg, how.engines[0], 1).run_round
        times = interleaved(rounds, how.passes, how.device)
    ours = [(used, times[a], times[b]) for used, a, b in engines]
    alone = {label: times[label] for label in bare}
    return Measured(name, work.title + beside, alone, ours, times.get("single"))


def bench_config(config: Config, passes: int) -> Iterator[str]:
    """The user's own run: its engine against one client after another."""
    ours = config.make_run()
    plain = config.model_copy(update={"engine": "sequential", "workers": 1}).make_run()
    ours.run_round(), plain.run_round()
    times = interleaved({"plain": plain.run_round, "ours": ours.run_round}, passes)
    yield f"{config.algorithm.name} on {config.data.name}, evaluation included"
    yield f"  {'one client after another':<32} {times['plain']:8.4f} s a round"
    ratio = times["ours"] / times["plain"]
    yield f"  {ours.trainer.engine:<32} {times['ours']:8.4f} s  {ratio:6.2f} of that"


def interleaved(rounds: dict[str, Round], passes: int, device: str = "cpu") -> dict[str, float]:
    """The median seconds of each, all of them once in every pass."""
    times: dict[str, list[float]] = {label: [] for label in rounds}
    for run in rounds.values():
        run()
    for _ in range(passes):
        for label, run in rounds.items():
            synchronise(device)
            start = time.perf_counter()
            run()
            synchronise(device)
            times[label].append(time.perf_counter() - start)
    return {label: statistics.median(values) for label, values in times.items()}


def peak() -> float:
    """Megabytes; Linux counts in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
