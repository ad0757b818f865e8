"""A short sweep for presets whose runs take minutes: three points for every algorithm, one seed.

    PREFED_DATA=... python scripts/tune_small.py cifar10-small      # about 15 minutes on one core

Like scripts/tune.py it scores on a validation split of the training data, with a seed no published
table uses, and goes on from scripts/tuned/PRESET.json. It runs fewer rounds than the preset has,
so it favours fast starts; the presets it chose for say so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefed.config import load
from prefed.files import write_whole
from prefed.jobs import Job, run_jobs

SEED = 1000
ROUNDS = {"cifar10-small": 12, "shakespeare": 15, "synthetic": 60}
SGD = [{"client_lr": lr} for lr in (0.03, 0.1, 0.3)]
COVARIANCE = [{"client_lr": lr} for lr in (0.0003, 0.001, 0.003)]
GRIDS: dict[str, list[dict[str, float]]] = {
    "prefed": COVARIANCE,
    "fedavg": SGD,
    "fedadam": [{"client_lr": 0.05, "server_lr": lr} for lr in (0.003, 0.01, 0.03)],
    "prefedopt": [{"client_lr": 0.05, "server_lr": lr} for lr in (0.003, 0.01, 0.03)],
    "adaalter": [{"client_lr": lr} for lr in (0.003, 0.01, 0.03)],
    "fedyogi": [{"client_lr": 0.05, "server_lr": lr} for lr in (0.003, 0.01, 0.03)],
    "fedadagrad": [{"client_lr": 0.05, "server_lr": lr} for lr in (0.01, 0.03, 0.1)],
}
OTHER: dict[str, dict[str, list[dict[str, float]]]] = {
    "shakespeare": {
        "fedavg": [{"client_lr": lr} for lr in (0.3, 1.0, 3.0)],
        **{
            name: [{"client_lr": 1.0, "server_lr": lr} for lr in (0.003, 0.01, 0.03)]
            for name in ("fedadam", "fedyogi", "prefedopt")
        },
        "fedadagrad": [{"client_lr": 1.0, "server_lr": lr} for lr in (0.01, 0.03, 0.1)],
    }
}


def main(preset: str) -> None:
    path = Path(__file__).parent / "tuned" / f"{preset}.json"
    done: dict[str, float | None] = json.loads(path.read_text()) if path.exists() else {}
    grids = GRIDS | OTHER.get(preset, {})
    todo = [(n, p) for n, points in grids.items() for p in points if key(n, p) not in done]
    jobs = [Job(config(preset, *point)) for point in todo]
    accuracy: dict[int, float] = {}
    for number, event in run_jobs(jobs, 1) if jobs else ():
        if "record" in event:
            if event["record"]["test_accuracy"] is not None:
                accuracy[number] = event["record"]["test_accuracy"]
            continue
        if "failed" in event:
            sys.exit(f"{key(*todo[number])}: {event['failed']}")
        done[key(*todo[number])] = None if "diverged" in event else accuracy[number]
        print(key(*todo[number]), done[key(*todo[number])], flush=True)
        write_whole(path, json.dumps(done, indent=0, sort_keys=True) + "\n")
    for name, points in grids.items():
        best = max(points, key=lambda point: done[key(name, point)] or 0.0)
        edge = " (edge of the grid)" if best in (points[0], points[-1]) else ""
        print(f"{name}: {best} {done[key(name, best)]}{edge}")


def key(name: str, point: dict[str, float]) -> str:
    return " ".join([name, *(f"{k}={v:g}" for k, v in point.items()), f"seed={SEED}"])


def config(preset: str, name: str, point: dict[str, float]) -> dict[str, Any]:
    rounds = ROUNDS[preset]
    changes = [f"algorithm={name}", f"seed={SEED}", "data.validation=0.1", f"rounds={rounds}"]
    changes += [f"evaluate_every={rounds}", *(f"algorithm.{k}={v}" for k, v in point.items())]
    return load(preset, changes).to_dict()


if __name__ == "__main__":
    main(sys.argv[1])
