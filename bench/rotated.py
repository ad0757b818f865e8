"""Rounds to a target loss on a rotated quadratic with condition 1e4, split over clients.

    python bench/rotated.py [--json FILE]

Full-matrix PreFed against diagonal PreFed and FedAdam, each with its best step size from grids of
the same size. Rounds are counted until F - F* has fallen to a thousandth of its first value.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import prefed
from prefed.core.errors import Diverged
from prefed.theory.quadratic import Quadratic

TARGET = 1e-3
STEPS = 5
ADAPTIVE = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Steps of rules that normalise: of PreFed's clients, of FedAdam's server. The optimum is about 100
away in the flattest direction."""
PLAIN = (0.1, 0.3, 1.0)
"""Steps of FedAdam's clients, which are plain SGD on a curvature of 1."""
TAUS = (1e-4, 1e-3, 1e-2)

GRIDS: dict[str, list[dict[str, Any]]] = {
    "PreFed, full": [
        {"name": "prefed", "shape": "full", "client_lr": lr, "tau": tau}
        for lr, tau in product(ADAPTIVE, TAUS)
    ],
    "PreFed, diagonal": [
        {"name": "prefed", "client_lr": lr, "tau": tau} for lr, tau in product(ADAPTIVE, TAUS)
    ],
    "FedAdam": [
        {"name": "fedadam", "client_lr": lr, "server_lr": rate}
        for lr, rate in product(PLAIN, ADAPTIVE)
    ],
}


def problem(d: int = 20, clients: int = 10, condition: float = 1e4) -> Quadratic:
    """Noise as badly conditioned as the curvature, the clients' optima apart, and a start from
    which each direction adds as much to the loss as any other: all of them have to be solved."""
    made = Quadratic.make(
        d, clients, samples=100, condition=condition, noise=0.03, spread=0.01, seed=1
    )
    values, V = torch.linalg.eigh(made.H)
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(d, generator=generator, dtype=torch.float64)
    return replace(made, start=made.optimum + V @ (z / values.sqrt()))


def rounds_to_target(quadratic: Quadratic, options: dict[str, Any], most: int) -> int | None:
    """None if the run diverges or takes more than `most` rounds."""
    chosen = dict(options)
    algorithm = prefed.ALGORITHMS.get(chosen.pop("name"))(**chosen)
    simulation = quadratic.simulation(
        algorithm, rounds=most, local_steps=STEPS, batch_size=10, engine="vectorised"
    )
    first = float(quadratic.excess(quadratic.start))
    try:
        for record in simulation.rounds():
            if float(quadratic.excess(simulation.server.weights)) <= TARGET * first:
                return int(record["round"])
    except Diverged:
        pass
    return None


def race(quadratic: Quadratic, most: int) -> dict[str, tuple[int | None, dict[str, Any]]]:
    """The fewest rounds of each algorithm, and the options they took."""
    best: dict[str, tuple[int | None, dict[str, Any]]] = {}
    for name, grid in GRIDS.items():
        fewest: int | None = None
        chosen: dict[str, Any] = {}
        for options in grid:
            found = rounds_to_target(quadratic, options, min(most, fewest or most))
            if found is not None and (fewest is None or found < fewest):
                fewest, chosen = found, options
        best[name] = (fewest, chosen)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="rounds to a target on a rotated quadratic")
    parser.add_argument("--most", type=int, default=3000, help="rounds after which a run is over")
    parser.add_argument("--json", type=Path, help="write the result to a file")
    chosen = parser.parse_args()
    best = race(problem(), chosen.most)
    full = best["PreFed, full"][0]
    for name, (rounds, options) in best.items():
        text = f"more than {chosen.most}" if rounds is None else str(rounds)
        ratio = "" if full is None else f"{(rounds or chosen.most) / full:6.1f} x"
        print(f"{name:<20} {text:>14} rounds {ratio}   {options}")
    if chosen.json:
        chosen.json.write_text(json.dumps(best, indent=2) + "\n")


if __name__ == "__main__":
    main()
