"""Accuracy against epsilon: which way to a private model works best.

    python scripts/privacy.py                 all of it, about twenty minutes on two quiet cores
    python scripts/privacy.py --smoke         two rounds of everything, to see that it runs

Fashion-MNIST over 1,000 clients, 60 samples each, a hundred expected in a round. Every algorithm
gets eight points on the validation split for each epsilon, with a seed of its own; the best goes on
to three seeds that all share. Stopped, it goes on where it was: each result is in the JSON file as
soon as it is known.
"""

import argparse
import itertools
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import prefed
from prefed.core.errors import Diverged
from prefed.core.safe_files import write_whole
from prefed.data import Dataset, FederatedData
from prefed.experiments.config import Config, load

OUT = Path(__file__).parent.parent / "docs" / "results" / "privacy" / "runs.json"
EPSILONS = [1.0, 2.0, 4.0, 8.0, math.inf]
DELTA = 1e-5
TUNING_SEED, SEEDS = 1000, [0, 1, 2]
CONFIG: dict[str, Any] = {
    "rounds": 60,
    "clients_per_round": 100,
    "local_steps": 5,
    "batch_size": 20,
    "evaluate_every": 1000,
    "engine": "vectorised",
    "device": "cpu",
    "data": {
        "name": "fashion-mnist",
        "split": {"name": "dirichlet", "clients": 1000, "alpha": 1.0},
    },
    "model": {"name": "mlp", "hidden": [32]},
}
CLIP = {"quantile": 0.5, "start": 0.1}

Grid = dict[str, list[Any]]
PLAIN: Grid = {"client_lr": [0.03, 0.1, 0.3, 1.0]}
LOCAL: Grid = {"client_lr": [0.003, 0.01, 0.03, 0.1]}
SERVER: Grid = {"client_lr": [0.1, 0.3], "server_lr": [0.001, 0.003, 0.01, 0.03]}
LINES: dict[str, tuple[dict[str, Any], Grid]] = {
    "FedAvg": ({"name": "fedavg"}, PLAIN | {"server_lr": [0.5, 1.0]}),
    "FedAdam": ({"name": "fedadam", "tau": 1e-4}, SERVER),
    "PreFedOpt": ({"name": "prefedopt", "per_step": False, "tau": 1e-4}, SERVER),
    "PreFed, shared": ({"name": "prefed", "tau": 0.01}, LOCAL | {"scale": [1.0, 10.0]}),
    "PreFed, derived": (
        {"name": "prefed", "P": "derived", "momentum": "derived"},
        LOCAL | {"tau": [0.01, 0.1]},
    ),
}
"""Eight points each. `scale` is the clip of m and of the root of P, beside 1 for the weights: they
are clipped as one vector, and the clip follows the median. Without privacy it changes nothing, and
tau has its place."""


def points(grid: Grid) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def jobs(line: str, epsilon: float) -> list[dict[str, Any]]:
    """The points of a line at an epsilon: options of the algorithm and of the privacy."""
    algorithm, grid = LINES[line]
    made = []
    for point in points(grid):
        scale = point.pop("scale", None)
        privacy: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "clip": CLIP}
        if math.isinf(epsilon):
            privacy, point = {}, point | ({"tau": 0.01 * scale} if scale else {})
        elif scale:
            privacy |= {"state": "joint", "state_clip": {"m": CLIP["start"] * scale}}
            privacy["state_clip"]["P"] = CLIP["start"] * scale
        made.append({"algorithm": algorithm | point, "privacy": privacy})
    return made


@lru_cache(maxsize=2)
def data_of(seed: int, validation: float) -> tuple[Config, tuple[Dataset, FederatedData]]:
    table = CONFIG | {"algorithm": "fedavg", "seed": seed}
    config = load({**table, "data": {**CONFIG["data"], "validation": validation}})
    return config, config.make_data()


def run(job: dict[str, Any], seed: int, rounds: int) -> dict[str, Any]:
    """One run, judged after its last round: on the validation split if its seed is for tuning."""
    tuning = seed == TUNING_SEED
    config, (dataset, data) = data_of(seed, 0.1 if tuning else 0.0)
    options = dict(job["algorithm"])
    algorithm = prefed.ALGORITHMS.get(options.pop("name"))(**options)
    settings = {k: v for k, v in CONFIG.items() if k not in ("data", "model")}
    settings |= {"rounds": rounds, "seed": seed, "privacy": job["privacy"] or None}
    made = prefed.Run(algorithm, config.make_model(dataset), data, prefed.Settings(**settings))
    try:
        last = made.run().history[-1]
    except Diverged:
        return {"accuracy": None, "epsilon": None}
    return {"accuracy": last["test_accuracy"], "epsilon": last.get("epsilon")}


def key(line: str, epsilon: float, job: dict[str, Any], seed: int) -> str:
    """Of a result in the file."""
    return json.dumps(
        [line, str(epsilon), job["algorithm"], job["privacy"].get("state_clip"), seed]
    )


def best(results: dict[str, Any], line: str, epsilon: float) -> dict[str, Any] | None:
    """The point with the highest accuracy, once all are known."""
    found = []
    for job in jobs(line, epsilon):
        known = results.get(key(line, epsilon, job, TUNING_SEED))
        if known is None:
            return None
        found.append((known["accuracy"] if known["accuracy"] is not None else -1.0, job))
    return max(found, key=lambda pair: pair[0])[1]


def table(results: dict[str, Any], rounds: int) -> str:
    lines = [
        "# Accuracy against epsilon",
        "",
        f"Fashion-MNIST, 1,000 clients (Dirichlet 1.0), {CONFIG['clients_per_round']} of them "
        f"expected in a round by Poisson sampling, {rounds} rounds of {CONFIG['local_steps']} "
        f"local steps, a network of 784-32-10. delta = {DELTA:g}, the clip follows the median "
        f"(Andrew et al. 2021), epsilon by Renyi divergences, add-or-remove one client. Test "
        f"accuracy in %, mean and standard deviation over {len(SEEDS)} seeds; eight points of "
        f"tuning for every cell, on a validation split, which are outside the "
        f"guarantee. Made by `python scripts/privacy.py`.",
        "",
        "| | " + " | ".join("no privacy" if math.isinf(e) else f"{e:g}" for e in EPSILONS) + " |",
        "|---|" + "---|" * len(EPSILONS),
    ]
    chosen = []
    for line in LINES:
        cells = []
        for epsilon in EPSILONS:
            job = best(results, line, epsilon)
            known = [results.get(key(line, epsilon, job, s)) for s in SEEDS] if job else []
            values = [k["accuracy"] for k in known if k and k["accuracy"] is not None]
            if len(values) < len(SEEDS):
                cells.append("diverged" if len(known) == len(SEEDS) and all(known) else "-")
            else:
                cells.append(f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f}")
            if job:
                options = {k: v for k, v in job["algorithm"].items() if k != "name"}
                scale = job["privacy"].get("state_clip", {}).get("P")
                own = options | ({"state_clip": scale} if scale else {})
                chosen.append(f"- {line}, epsilon {epsilon:g}: {own}")
        lines.append(f"| {line} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "What was chosen:", "", *chosen, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the JSON file; docs/results/privacy/runs.json")
    parser.add_argument("--smoke", action="store_true", help="two rounds, one point, one seed")
    given = parser.parse_args()
    rounds: int = 2 if given.smoke else CONFIG["rounds"]
    given.out = given.out or (Path(mkdtemp()) / "smoke.json" if given.smoke else OUT)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    cells = list(itertools.product(LINES, EPSILONS))
    given.out.parent.mkdir(parents=True, exist_ok=True)

    def carry_out(wanted: list[tuple[str, float, dict[str, Any], int]]) -> None:
        left = [one for one in wanted if key(*one) not in results]
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
            running = {pool.submit(run, one[2], one[3], rounds): one for one in left}
            for done, future in enumerate(as_completed(running), 1):
                one = running[future]
                results[key(*one)] = future.result()
                write_whole(given.out, json.dumps(results, indent=0, sort_keys=True) + "\n")
                accuracy = results[key(*one)]["accuracy"]
                shown = "diverged" if accuracy is None else f"{accuracy:.1%}"
                print(f"{done}/{len(left)}  {one[0]}, epsilon {one[1]:g}: {shown}", flush=True)

    few = 1 if given.smoke else None
    carry_out([(n, e, job, TUNING_SEED) for n, e in cells for job in jobs(n, e)[:few]])
    if not given.smoke:
        chosen = [(n, e, best(results, n, e)) for n, e in cells]
        carry_out([(n, e, job, seed) for n, e, job in chosen if job for seed in SEEDS])
    page = given.out.parent.with_suffix(".md")
    write_whole(page, table(results, rounds))
    print(page)


if __name__ == "__main__":
    main()
