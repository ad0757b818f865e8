"""Every algorithm with nothing but its defaults, one step size for all: docs/results/untuned.md.

    python scripts/untuned.py [--out docs/results/untuned] [--tasks digits-noniid,...] [--workers 2]

The tasks are the presets of the studies, without the options that were tuned for them and without
schedules, on their test sets, with the first seeds of the studies. For each algorithm: the result
on each task, its rank there, the mean of its ranks, and what it loses against its tuned self where
a study has tuned it (the regret of the defaults). OUT/scores.json keeps what was run, so that the
same command goes on.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

from prefed.core.errors import Diverged
from prefed.core.safe_files import write_whole
from prefed.experiments.config import Config, load
from prefed.experiments.measures import ACCURACY, LAST, LOSS, Measure
from prefed.experiments.toml_files import read

Scores = dict[str, float | None]
"""By "task: algorithm: seed"; None for a run that diverged."""

TASKS = {
    "digits-noniid": 3,
    "digits-iid": 3,
    "synthetic": 3,
    "digits-autoencoder": 3,
    "cifar10-small": 1,
    "cifar10-small-iid": 1,
    "shakespeare": 1,
}
"""Presets, and how many seeds."""
STUDY = {"cifar10-small": "cifar10-noniid", "cifar10-small-iid": "cifar10-iid"}
"""The studies whose name is not the preset's."""
ALGORITHMS = [
    "fedavg", "fedavgm", "fedprox", "scaffold", "fedadagrad", "fedadam", "fedyogi", "adaalter",
    "localadam", "fedcm", "fedlada", "fedadamw", "fedlion", "fedmuon", "mimelite", "fedpac",
    "prefed", "prefedlite", "prefedopt", "prefedm", "prefedmlite", "prefeds", "prefedslite",
    "prefedc", "prefedclite",
]  # fmt: skip
Job = tuple[str, str, int]


def key(task: str, algorithm: str, seed: int) -> str:
    return f"{task}: {algorithm}: {seed}"


def make_config(task: str, algorithm: str, seed: int) -> Config:
    table = read(task)
    del table["tuned"]
    changes = ["device=cpu", "workers=1", f"seed={seed}"]
    return load({**table, "algorithm": {"name": algorithm}}, changes)


def measure(task: str) -> Measure:
    return LOSS if "autoencoder" in task else ACCURACY


def score(job: Job) -> tuple[str, float | None]:
    """The mean over the last tenth of the rounds."""
    import torch

    torch.set_num_threads(1)
    run, by = make_config(*job).make_run(), measure(job[0])
    last = max(1, round(LAST * run.settings.rounds))
    run.evaluate_from, found = run.settings.rounds + 1, []
    try:
        for record in run.rounds():
            if record["round"] > run.settings.rounds - last:
                found.append(run.evaluate()[by.key])
    except Diverged:
        return key(*job), None
    return key(*job), fmean(found)


def tuned(results: Path, task: str) -> dict[str, float]:
    """What a study has with tuned options, by algorithm."""
    path = results / f"{STUDY.get(task, task)}.json"
    lines = json.loads(path.read_text())["lines"] if path.exists() else []
    found: dict[str, float] = {}
    for line in lines:
        name = line["algorithm"]["name"]
        if line["label"].lower() == name and line["mean"] is not None:
            found[name] = line["mean"]
    return found


def text(scores: Scores, results: Path) -> str:
    """The table of all tasks that are done, beside what the studies in `results` have."""
    names = {task: [key(task, a, s) for a in ALGORITHMS for s in range(n)]
             for task, n in TASKS.items()}  # fmt: skip
    return table(scores, [task for task in TASKS if scores.keys() >= {*names[task]}], results)


def table(scores: Scores, tasks: list[str], results: Path) -> str:
    means: dict[str, dict[str, float | None]] = {}
    for task in tasks:
        means[task] = {}
        for algorithm in ALGORITHMS:
            each = [scores.get(key(task, algorithm, seed)) for seed in range(TASKS[task])]
            known = [value for value in each if value is not None]
            means[task][algorithm] = fmean(known) if len(known) == len(each) else None
    ranks = {name: [rank(means[task], name, measure(task).sign) for task in tasks]
             for name in ALGORITHMS}  # fmt: skip
    heads = ["", *tasks, "mean rank", "mean regret"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    best = {task: tuned(results, task) for task in tasks}
    for name in sorted(ALGORITHMS, key=lambda name: fmean(ranks[name])):
        cells, losses = [], []
        for task, place in zip(tasks, ranks[name], strict=True):
            by, mean = measure(task), means[task][name]
            cells.append("diverged" if mean is None else f"{by.text(mean)} ({place:g})")
            if by is ACCURACY and mean is not None and name in best[task]:
                losses.append(best[task][name] - 100 * mean)
        regret = f"{fmean(losses):.1f}" if losses else ""
        lines.append(
            f"| {name} | " + " | ".join(cells) + f" | {fmean(ranks[name]):.1f} | {regret} |"
        )
    return "\n".join(lines) + "\n"


def rank(means: dict[str, float | None], name: str, sign: int) -> float:
    """From 1; those that diverged share the last places."""
    mine = means[name]
    if mine is None:
        lost = [n for n, value in means.items() if value is None]
        return len(means) - (len(lost) - 1) / 2
    others = [value for n, value in means.items() if value is not None and n != name]
    ahead = sum(sign * value > sign * mine for value in others)
    return 1 + ahead + sum(value == mine for value in others) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/untuned"))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    tasks = given.tasks.split(",")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "scores.json"
    scores: Scores = json.loads(path.read_text()) if path.exists() else {}
    jobs: list[Job] = [(t, a, s) for t in tasks for s in range(TASKS[t]) for a in ALGORITHMS]
    left = [job for job in jobs if key(*job) not in scores]
    with ProcessPoolExecutor(given.workers) as pool:
        for done, (name, value) in enumerate(pool.map(score, left), 1):
            scores[name] = value
            write_whole(path, (json.dumps(scores, indent=0) + "\n").encode())
            print(f"[{done}/{len(left)}] {name}: {value}", flush=True)
    write_whole(given.out.with_suffix(".md"), text(scores, given.out.parent).encode())
    print(text(scores, given.out.parent))


if __name__ == "__main__":
    main()
