"""The searches behind PreFedM, PreFedS and PreFedC (docs/decisions/042, 044, 049): forms of a
preconditioned client on three tasks.

python scripts/search.py [--out docs/results/search] [--workers 2]

Every form gets the same step sizes and seeds on a validation split that no table uses; its best
step size counts. A run is scored twice, by its last weights and by their mean over rounds. Scores
are kept in OUT/scores.json, so that the same command goes on, and OUT.md is the table.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from prefed.core.errors import Diverged
from prefed.core.safe_files import write_whole
from prefed.experiments.measures import LAST
from prefed.experiments.study import Study, read

Scores = dict[str, list[float] | None]

TASKS: dict[str, dict[str, Any]] = {
    "digits-noniid": {"rates": [0.005, 0.01, 0.02, 0.05], "seeds": [1000, 1001, 1002]},
    "synthetic": {"rates": [0.0005, 0.001, 0.002, 0.005], "seeds": [1000, 1001, 1002]},
    "cifar10-noniid": {"rates": [0.001, 0.002, 0.004], "seeds": [1000, 1001]},
}
MEAN_OF_ROUNDS = 4.0


def prefed(server_momentum: float = 0.0, **rule: Any) -> dict[str, Any]:
    """PreFed as a pair, with m and P averaged."""
    share = {"m": "average", "P": "average"}
    return pair({"name": "covariance", **rule}, server_momentum, share)


def pair(client: dict[str, Any], momentum: float, share: dict[str, Any]) -> dict[str, Any]:
    server = {"name": "sgd", "momentum": momentum}
    return {"name": "pair", "client": client, "server": server, "share": share}


def prefedm(**options: Any) -> dict[str, Any]:
    return {"name": "prefedm", **options}


SQUARES = {"name": "adam", "beta1": 0.0, "beta2": 0.999, "bias_correction": True}
FORMS: dict[str, dict[str, Any]] = {
    "PreFed": prefed(),
    "PreFed, beta1 = .97, beta2 = .99": prefed(beta1=0.97, beta2=0.99),
    "PreFed, beta2 = .999, corrected": prefed(beta2=0.999, bias_correction=True),
    "PreFed, server momentum .7": prefed(0.7),
    "PreFedM": prefedm(),
    "PreFedM, tau = 1e-3": prefedm(tau_relative=None),
    "PreFedM, tau = .3 relative": prefedm(tau_relative=0.3),
    "PreFedM, beta2 = .99": prefedm(beta2=0.99),
    "PreFedM, no correction": prefedm(bias_correction=False),
    "PreFedM, server momentum 0": prefedm(server_momentum=0.0),
    "PreFedM, server momentum .5": prefedm(server_momentum=0.5),
    "PreFedM, server momentum .9": prefedm(server_momentum=0.9),
    "PreFedM, align = .3": prefedm(align=0.3),
    "PreFedM, align = .3, mixed": prefedm(align=0.3, align_form="mixed"),
    "PreFedM, tau = 1e-3, squares for P": pair(SQUARES, 0.7, {"v": "average"}),
    "PreFedMLite": {"name": "prefedmlite"},
}
SPECTRAL: dict[str, dict[str, Any]] = {
    "FedMuon, momenta averaged": {"name": "fedmuon", "momentum": "average"},
    "PreFedS, tau = .1 relative": {"name": "prefeds", "tau_relative": 0.1},
    "PreFedS, tau = .3 relative": {"name": "prefeds", "tau_relative": 0.3},
    "PreFedS, tau = 1 relative": {"name": "prefeds", "tau_relative": 1.0},
    "PreFedS, refresh = 5": {"name": "prefeds", "refresh": 5},
    "PreFedS, refresh = 10": {"name": "prefeds", "refresh": 10},
    "PreFedC, own_lr = 0": {"name": "prefedc", "own_lr": 0.0},
    "PreFedC, own_lr = .5": {"name": "prefedc", "own_lr": 0.5},
    "PreFedC": {"name": "prefedc"},
    "PreFedC, own_lr = 2": {"name": "prefedc", "own_lr": 2.0},
    "PreFedC, beta1 = .8": {"name": "prefedc", "beta1": 0.8},
    "PreFedC, beta1 = .95": {"name": "prefedc", "beta1": 0.95},
    "PreFedCLite": {"name": "prefedclite"},
}
"""Orthogonal steps have other step sizes."""
FORMS |= SPECTRAL
SPECTRAL_RATES = {
    "digits-noniid": [0.01, 0.02, 0.04], "synthetic": [0.0025, 0.005, 0.01, 0.02],
    "cifar10-noniid": [0.01, 0.02, 0.04],
}  # fmt: skip


def rates(task: str, form: str) -> list[float]:
    found: list[float] = SPECTRAL_RATES[task] if form in SPECTRAL else TASKS[task]["rates"]
    return found


def score(job: tuple[str, str, float, int]) -> tuple[str, list[float] | None]:
    """By the last weights, and by their mean: each the mean over the last tenth of the rounds."""
    import torch

    torch.set_num_threads(1)
    task, form, rate, seed = job
    _, study = read(task)
    run = make_config(study, FORMS[form], rate, seed).make_run()
    run.evaluate_from = run.settings.rounds + 1
    last = max(1, round(LAST * run.settings.rounds))
    found: list[tuple[float, float]] = []
    try:
        for record in run.rounds():
            if record["round"] > run.settings.rounds - last:
                means, run.server.over_rounds = run.server.over_rounds, {}
                plain = run.evaluate()["test_accuracy"]
                run.server.over_rounds = means
                found.append((plain, run.evaluate()["test_accuracy"]))
    except Diverged:
        return key(*job), None
    return key(*job), [fmean(column) for column in zip(*found, strict=True)]


def make_config(study: Study, form: dict[str, Any], rate: float, seed: int) -> Any:
    """With the task's own schedule, if it has one."""
    tuning = study.tuning
    changes = [f"seed={seed}", f"data.validation={tuning.validation}"]
    changes += [f"rounds={tuning.rounds}"] if tuning.rounds else []
    own = study.make_config("prefed", "prefed", {}, *changes).algorithm.options["client_lr"]
    lr = {**own, "start": rate} if isinstance(own, dict) else rate
    options = {**form, "client_lr": lr, "mean_of_rounds": MEAN_OF_ROUNDS}
    name = options.pop("name")
    return study.make_config(name, name, options, *changes)


def key(task: str, form: str, rate: float, seed: int) -> str:
    return f"{task}: {form}: {rate:g}: {seed}"


def jobs() -> Iterator[tuple[str, str, float, int]]:
    for task, grid in TASKS.items():
        for form in FORMS:
            for rate in rates(task, form):
                yield from ((task, form, rate, seed) for seed in grid["seeds"])


def best(scores: Scores, task: str, form: str, column: int) -> tuple[float, float] | None:
    """The best mean over seeds, and its step size."""
    found = []
    for rate in rates(task, form):
        each = [scores.get(key(task, form, rate, seed)) for seed in TASKS[task]["seeds"]]
        if all(each):
            found.append((fmean(value[column] for value in each if value), rate))
    return max(found, default=None)


def text(scores: Scores) -> str:
    heads = [f"{task}{more}" for task in TASKS for more in (", last weights", ", their mean")]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for form in FORMS:
        cells = []
        for task in TASKS:
            for column in (0, 1):
                found = best(scores, task, form, column)
                text = "-" if found is None else f"{100 * found[0]:.2f} ({found[1]:g})"
                cells.append(text)
        lines.append(f"| {form} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/search"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "scores.json"
    scores: Scores = json.loads(path.read_text()) if path.exists() else {}
    left = [job for job in jobs() if key(*job) not in scores]
    with ProcessPoolExecutor(options.workers) as pool:
        for done, (name, value) in enumerate(pool.map(score, left), 1):
            scores[name] = value
            write_whole(path, (json.dumps(scores, indent=0) + "\n").encode())
            print(f"[{done}/{len(left)}] {name}: {value}", flush=True)
    write_whole(options.out.with_suffix(".md"), text(scores).encode())
    print(text(scores))


if __name__ == "__main__":
    main()
