"""Rounds of prefed and of the bare loops in turn, so that a busy moment of the machine hits all."""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from prefed.algorithms import Algorithm
from prefed.algorithms.fedavg import FedAvg
from prefed.algorithms.prefed import PreFed
from prefed.bench.bare import LR, Alone, Processes, Threads
from prefed.bench.workloads import WORKLOADS, Workload
from prefed.core.machine import torch_threads
from prefed.experiments.config import Config
from prefed.training.run import Run
from prefed.training.settings import Settings

Round = Callable[[], object]


def simulation(work: Workload, algorithm: Algorithm, engine: str, workers: int) -> Run:
    settings = Settings(
        rounds=1_000_000,
        clients_per_round=work.clients_per_round,
        local_steps=work.local_steps,
        batch_size=work.batch_size,
        engine=engine,
        workers=workers,
        device="cpu",
    )
    torch.manual_seed(0)
    return Run(algorithm, work.model(), work.data, settings)


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


def bench(name: str, passes: int, engine: str, workers: int, beside: int = 0) -> Iterator[str]:
    """The table of a workload, line by line: seconds a round, and ratios to the best bare loop;
    beside some busy processes, if wanted."""
    work, cores = WORKLOADS[name](), max(2, torch.get_num_threads())
    with ExitStack() as stack:
        stack.enter_context(neighbours(beside))
        threads, others = Threads(work, cores), Processes(name, work, cores)
        stack.callback(threads.close)
        stack.callback(others.close)
        fedavg = simulation(work, FedAvg(client_lr=LR), engine, workers)
        prefed = simulation(work, PreFed(), engine, workers)
        fedavg.run_round(), prefed.run_round()
        with torch_threads(1):
            single = simulation(work, FedAvg(client_lr=LR), engine, 1)
            single.run_round()
        rounds: dict[str, Round] = {
            "bare loop, all cores on a client": Alone(work).round,
            f"bare loop, {cores} threads": threads.round,
            f"bare loop, {cores} processes": others.round,
            f"prefed FedAvg ({fedavg.trainer.engine})": fedavg.run_round,
            f"prefed PreFed ({prefed.trainer.engine})": prefed.run_round,
            f"one thread in all, FedAvg ({single.trainer.engine})": single.run_round,
        }
        times = interleaved(rounds, passes)
    yield work.title + (f", beside {beside} busy processes" if beside else "")
    yield "  seconds a round, and as a share of the best bare loop"
    best = min(seconds for label, seconds in times.items() if label.startswith("bare"))
    for label, seconds in times.items():
        yield f"  {label:<58} {seconds:8.4f}  {seconds / best:6.2f}"
    ours = [seconds for label, seconds in times.items() if label.startswith("prefed")]
    alone = next(seconds for label, seconds in times.items() if label.startswith("one thread"))
    yield f"  PreFed / FedAvg {ours[1] / ours[0]:.2f}"
    yield f"  FedAvg / FedAvg with one thread in all {ours[0] / alone:.2f}"
    yield f"  peak memory of this process {peak():.0f} MB"


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


def interleaved(rounds: dict[str, Round], passes: int) -> dict[str, float]:
    """The median seconds of each, all of them once in every pass."""
    times: dict[str, list[float]] = {label: [] for label in rounds}
    for run in rounds.values():
        run()
    for _ in range(passes):
        for label, run in rounds.items():
            start = time.perf_counter()
            run()
            times[label].append(time.perf_counter() - start)
    return {label: statistics.median(values) for label, values in times.items()}


def peak() -> float:
    """Megabytes; Linux counts in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
