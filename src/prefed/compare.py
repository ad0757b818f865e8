"""Several algorithms on one config, each with several seeds, and the table of what came out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from prefed.config import load
from prefed.jobs import Job, run_jobs
from prefed.simulation import Record


@dataclass
class Run:
    """One algorithm with one seed."""

    algorithm: str
    seed: int
    job: Job
    history: list[Record] = field(default_factory=list)
    problem: str | None = None
    """Why it did not come to its end: "diverged", or what failed."""

    def accuracy(self) -> float | None:
        return None if self.problem or not self.history else self.history[-1]["test_accuracy"]

    def rounds_to(self, target: float) -> int | None:
        reached = (r["round"] for r in self.history if (r["test_accuracy"] or 0) >= target)
        return next(reached, None)

    def total(self, key: str) -> float:
        return float(sum(record[key] for record in self.history))


def compare(
    source: str,
    algorithms: Iterable[str],
    seeds: int,
    changes: Iterable[str] = (),
    out: Path | None = None,
    workers: int | None = None,
    on_event: Callable[[Run, dict[str, Any]], None] = lambda run, event: None,
) -> list[Run]:
    """All runs of the comparison. Seeds are paired: seed s has the same split, first weights,
    cohorts and batches for every algorithm."""
    runs = []
    for name in algorithms:
        for seed in range(seeds):
            config = load(source, [f"algorithm={name}", *changes, f"seed={seed}"])
            folder = None if out is None else out / f"{name}-seed{seed}"
            runs.append(Run(name, seed, Job(config.to_dict(), folder)))
    # Seed by seed, so that the algorithms stand side by side early on.
    runs.sort(key=lambda run: run.seed)
    for number, event in run_jobs([run.job for run in runs], workers or os.cpu_count() or 1):
        run = runs[number]
        if "record" in event:
            run.history.append(event["record"])
        elif "diverged" in event:
            run.problem = "diverged"
        elif "failed" in event:
            run.problem = event["failed"]
        on_event(run, event)
    return runs


def table(runs: list[Run], target: float) -> Table:
    """Best mean accuracy first. A run that diverged is counted as what it is, not left out."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.algorithm, []).append(run)
    view = Table("algorithm", title=None)
    for heading in ("accuracy %", f"rounds to {target:.0%}", "MB up", "MB down", "seconds"):
        view.add_column(heading, justify="right")
    rows = []
    for name, group in by_name.items():
        values = [100 * a for a in (run.accuracy() for run in group) if a is not None]
        mean = fmean(values) if values else float("-inf")
        rows.append(
            (mean, [name, _accuracy(group, values), _rounds(group, target), *_costs(group)])
        )
    for _, row in sorted(rows, key=lambda item: -item[0]):
        view.add_row(*row)
    return view


def _accuracy(group: list[Run], values: list[float]) -> str:
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    text = f"{fmean(values):.1f}{spread}" if values else "-"
    lost = sum(run.problem == "diverged" for run in group)
    failed = sum(run.problem not in (None, "diverged") for run in group)
    text += f" ({lost}/{len(group)} diverged)" if lost else ""
    return text + (f" ({failed}/{len(group)} failed)" if failed else "")


def _rounds(group: list[Run], target: float) -> str:
    reached = [r for r in (run.rounds_to(target) for run in group) if r is not None]
    share = f" ({len(reached)}/{len(group)})" if len(reached) < len(group) else ""
    return f"{fmean(reached):.0f}{share}" if reached else "-"


def _costs(group: list[Run]) -> list[str]:
    up, down, seconds = (
        fmean(run.total(key) for run in group) for key in ("bytes_up", "bytes_down", "seconds")
    )
    return [f"{up / 1e6:.1f}", f"{down / 1e6:.1f}", f"{seconds:.1f}"]
