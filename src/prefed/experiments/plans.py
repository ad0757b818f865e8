"""Many runs for one question: comparisons of algorithms, and sweeps over options."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.core.errors import PrefedError, RunFailed
from prefed.experiments.changes import SEEDS, refuse
from prefed.experiments.config import Config, load
from prefed.experiments.jobs import Job, Many, run_jobs
from prefed.experiments.same_config import differing, read_config
from prefed.experiments.stored_runs import ARCHIVE, StoredRun, load_run
from prefed.experiments.trackers import Tracking


@dataclass(frozen=True)
class Planned:
    """A run that is wanted: its config, and the directory that will hold it."""

    title: str
    config: Config
    folder: Path

    def stored(self, archived: StoredRun | None = None) -> StoredRun | None:
        """The run if it is in the archive or on disk; an error if another one is."""
        if archived is None and not (self.folder / "config.toml").exists():
            return None
        there = read_config(self.folder) if archived is None else archived.config
        ended = archived is not None
        if differences := differing(there, self.config.to_dict(), ended):
            where = f"{self.folder.parent / ARCHIVE}: {self.folder.name}" if ended else self.folder
            raise PrefedError(
                f"{where}: holds a run of another config; choose another --out"
                f"{', or --again (prefed study)' if ended else ''}\n" + "\n".join(differences)
            )
        return archived or load_run(self.folder)

    def name(self, tracking: Tracking | None) -> str:
        """Where the directory lies in that of the experiment."""
        return "" if tracking is None else self.folder.relative_to(tracking.out).as_posix()


OnEvent = Callable[[Planned, dict[str, Any]], None]
"""Called with {"record": ...} for each round, and once with {"end": status} for each run."""


def run_all(
    planned: Sequence[Planned],
    workers: Many = None,
    on_event: OnEvent = lambda p, e: None,
    tracking: Tracking | None = None,
) -> list[StoredRun]:
    """Run what is not finished yet, side by side; the same call again goes on after a stop.

    A run that failed for other reasons than divergence ends the experiment with its message,
    after the others have come to their end.
    """
    waiting = []
    for plan in planned:
        stored = plan.stored()
        if stored is not None and stored.status in ("finished", "diverged"):
            on_event(plan, {"end": stored.status})
        else:
            waiting.append(plan)
    failures = []
    jobs = [Job(p.config.to_dict(), p.folder, tracking, p.name(tracking)) for p in waiting]
    for number, event in run_jobs(jobs, workers) if jobs else ():
        plan = waiting[number]
        if "record" in event:
            on_event(plan, event)
            continue
        if "failed" in event:
            failures.append(f"{plan.title}: {event['failed']}")
        on_event(plan, {"end": "finished" if "done" in event else next(iter(event))})
    if failures:
        raise RunFailed("\n".join(failures))
    return [load_run(plan.folder) for plan in planned]


def plan_comparison(
    source: str, algorithms: Iterable[str], seeds: int, changes: Sequence[str], out: Path
) -> list[Planned]:
    """Every algorithm with every seed. Seeds are paired: seed s has the same split, first
    weights, cohorts and batches for each algorithm. Ordered seed by seed."""
    refuse(changes, seed=SEEDS, algorithm="--algorithms says which are compared")
    if not (algorithms := [*dict.fromkeys(algorithms)]):  # each once
        raise PrefedError("--algorithms: names none")
    planned = []
    for seed in range(seeds):
        for name in algorithms:
            config = load(source, [f"algorithm={name}", *changes, f"seed={seed}"])
            folder = out / f"{name.replace(':', '.')}-seed{seed}"
            planned.append(Planned(f"{name} seed {seed}", config, folder))
    return planned
