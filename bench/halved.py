"""State in bfloat16 against state in float32: docs/results/halved.md.

    python bench/halved.py [--write]

Bytes and processor time of PreFed's local step, the two in turns, the fastest of several; and the
accuracy that runs end in, with beta2 = .999 as Adam has it and with the paper's .9.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

from prefed.core import draws
from prefed.core.layout import Layout
from prefed.core.safe_files import write_whole
from prefed.experiments.config import load
from prefed.rules import Covariance
from prefed.rules.halved import Halved
from prefed.rules.rule import Rule

SIZE, REPEATS = 4_000_000, 7
SEEDS = range(3)
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "halved.md"


def step_of(rule: Rule) -> tuple[Callable[[int], None], int]:
    """A step on weights of a large model, and the bytes of weights, gradient and state."""
    w, g = torch.zeros(1, SIZE), torch.randn(1, SIZE)
    fields = rule.fields(Layout.of([("w", w[0])]))
    state = {name: field.new(w, 1) for name, field in fields.items()}
    rule.begin(w, state)
    total = sum(t.nbytes for t in (w, g, *state.values()))
    return lambda k: rule.apply(w, g, state, 0.01, k), total


def steps() -> list[str]:
    plain = Covariance()
    rules = {
        "weights": plain.fused(torch.zeros(1)),
        "bfloat16": Halved(plain, lambda row, k: draws.generator(0, "state", 0, row, k)),
    }
    made = {name: step_of(rule) for name, rule in rules.items()}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for k in range(REPEATS):
        for name, (step, _) in made.items():
            start = time.process_time()
            step(k)
            seconds[name].append(time.process_time() - start)
    return [
        f"| `{name}` | {total / SIZE:.0f} | {1e9 * min(seconds[name]) / SIZE:.2f} |"
        for name, (_, total) in made.items()
    ]


def accuracy(dtype: str, beta2: float) -> str:
    found = []
    for seed in SEEDS:
        options = [f"algorithm.state_dtype={dtype}", f"beta2={beta2}", f"seed={seed}", "device=cpu"]
        run = load("digits-noniid", options).make_run()
        found.append(100 * float([*run.rounds()][-1]["test_accuracy"]))
    return f"{fmean(found):.2f} ({', '.join(f'{value:.2f}' for value in found)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| `state_dtype` | bytes a weight on a client | ns a weight of a step |",
        "|---|---|---|",
    ]
    lines += [*steps(), ""]
    lines += [
        f"| `digits-noniid`, PreFed, seeds {[*SEEDS]} | `weights` | `bfloat16` |",
        "|---|---|---|",
    ]
    for beta2 in (0.9, 0.999):
        cells = (accuracy(dtype, beta2) for dtype in ("weights", "bfloat16"))
        lines.append(f"| accuracy in %, beta2 = {beta2} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        write_whole(RESULTS, text)


if __name__ == "__main__":
    main()
