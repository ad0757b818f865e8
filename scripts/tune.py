"""Choose the step sizes of a preset: the same number of grid points for every algorithm.

    python scripts/tune.py digits-noniid            # about ten minutes on two cores

Each point runs with seeds that no published table uses, on a validation split of the training
data; the score is the mean accuracy over the last ten rounds (noise of single rounds must not
decide). Everything that was tried goes to scripts/tuned/PRESET.json; running the script again goes
on from there. The chosen points are printed as they stand in the preset.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import Progress

from prefed.config import load
from prefed.files import write_whole
from prefed.jobs import Job, run_jobs

SEEDS = (1000, 1001)
CLIENT = [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0]
ADAPTIVE_CLIENT = [0.001, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
SERVER = {"client_lr": [0.1, 0.3, 1.0], "tau": [1e-5, 1e-4, 1e-3]}
GRIDS: dict[str, dict[str, list[float]]] = {
    "fedavg": {"client_lr": CLIENT, "client_momentum": [0.0, 0.5, 0.9]},
    "fedadagrad": {**SERVER, "server_lr": [0.03, 0.1, 0.3]},
    "fedadam": {**SERVER, "server_lr": [0.01, 0.03, 0.1]},
    "fedyogi": {**SERVER, "server_lr": [0.01, 0.03, 0.1]},
    "adaalter": {"client_lr": ADAPTIVE_CLIENT, "tau": [1e-4, 1e-3, 1e-2]},
    "prefed": {"client_lr": ADAPTIVE_CLIENT, "tau": [1e-4, 1e-3, 1e-2]},
    "prefedopt": {**SERVER, "server_lr": [0.003, 0.01, 0.03]},
}
assert {len(list(product(*grid.values()))) for grid in GRIDS.values()} == {27}


def main(preset: str) -> None:
    path = Path(__file__).parent / "tuned" / f"{preset}.json"
    done: dict[str, float | None] = json.loads(path.read_text()) if path.exists() else {}
    points = [
        (name, dict(zip(grid, values, strict=True)), seed)
        for name, grid in GRIDS.items()
        for values in product(*grid.values())
        for seed in SEEDS
    ]
    todo = [point for point in points if key(*point) not in done]
    jobs = [Job(config(preset, *point)) for point in todo]
    accuracies: dict[int, list[float]] = {}
    with Progress() as progress:
        bar = progress.add_task(preset, total=len(points), completed=len(points) - len(todo))
        for number, event in run_jobs(jobs, os.cpu_count() or 1) if jobs else ():
            if "record" in event:
                accuracies.setdefault(number, []).append(event["record"]["test_accuracy"])
                continue
            if "failed" in event:
                sys.exit(f"{key(*todo[number])}: {event['failed']}")
            diverged = "diverged" in event
            done[key(*todo[number])] = None if diverged else fmean(accuracies[number][-10:])
            progress.advance(bar)
            if progress.tasks[0].completed % 20 == 0 or progress.finished:
                write_whole(path, json.dumps(done, indent=0, sort_keys=True) + "\n")
    write_whole(path, json.dumps(done, indent=0, sort_keys=True) + "\n")
    for name in GRIDS:
        report(name, done)


def key(name: str, point: dict[str, float], seed: int) -> str:
    options = (f"{k}={v:g}" for k, v in sorted(point.items()))
    return " ".join([name, *options, f"seed={seed}"])


def config(preset: str, name: str, point: dict[str, float], seed: int) -> dict[str, Any]:
    changes = [f"algorithm={name}", f"seed={seed}", "data.validation=0.2"]
    changes += [f"algorithm.{k}={v}" for k, v in point.items()]
    return load(preset, changes).to_dict()


def report(name: str, done: dict[str, float | None]) -> None:
    """The best point as TOML, with a word where it lies on the edge of a step size's grid."""
    grid = GRIDS[name]
    scores = {}
    for values in product(*grid.values()):
        results = [done[key(name, dict(zip(grid, values, strict=True)), seed)] for seed in SEEDS]
        scores[values] = fmean(-1.0 if r is None else r for r in results)
    best = max(scores, key=lambda values: scores[values])
    print(f"\n[tuned.{name}]  # validation accuracy {scores[best]:.3f}")
    for (option, tried), value in zip(grid.items(), best, strict=True):
        edge = "  # edge of the grid" if value in (tried[0], tried[-1]) else ""
        print(f"{option} = {value:g}{edge}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "digits-noniid")
