"""Clients that fail: never answer, or answer with what is not a number.

What a deployed server does with hostile answers is told in tests of admission; in a simulation an
answer has the right shape, and may only be missing or not finite.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch

import prefed
from prefed.core import draws
from tests.faults.trials import fault

NAMES = ("fedavg", "fedadam", "adaalter", "prefed", "prefedopt", "scaffold")


def clients(bad: set[int], rng: random.Random) -> prefed.FederatedData:
    """Eight clients; those that are bad have samples whose squares overflow."""
    torch.manual_seed(rng.randrange(1 << 30))
    pairs = []
    for client in range(8):
        x = torch.randn(6, 4, dtype=torch.float64) * (1e300 if client in bad else 1)
        pairs.append((x, torch.zeros(6, dtype=torch.long)))
    return prefed.FederatedData(pairs)


def run(data: prefed.FederatedData, name: str, **options: object) -> prefed.Simulation:
    settings = prefed.Settings.model_validate(
        {"rounds": 9, "local_steps": 2, "batch_size": 3, "device": "cpu", **options}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).double()
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=0.01)
    simulation = prefed.Simulation(
        algorithm, model, data, settings, loss=lambda out, y: (out**2).mean()
    )
    for _ in range(3):
        simulation.run_round()
    return simulation


def same(a: prefed.Simulation, b: prefed.Simulation) -> bool:
    one, two = a.snapshot(), b.snapshot()
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def without(bad: set[int], seed: int, round: int, cohort: list[int], share: float) -> list[int]:
    return [client for client in cohort if client not in bad]


@fault("clients whose update is not finite", times=200, quick=12, seconds=10)
def not_finite(times: int, rng: random.Random) -> Iterator[str]:
    """Left out and noted; the round is the one without them, to the bit."""
    real = draws.answering
    for trial in range(times):
        name = NAMES[trial % len(NAMES)]
        bad = set(rng.sample(range(8), rng.randint(1, 6)))
        data = clients(bad, rng)
        options: dict[str, object] = {
            "engine": rng.choice(["sequential", "vectorised"]),
            "workers": rng.choice([1, 2]),
            "seed": trial,
            "weighting": rng.choice(["uniform", "samples"]),
        }
        with_them = run(data, name, on_divergence="continue", **options)

        draws.answering = partial(without, bad)
        expected = run(data, name, **options)
        draws.answering = real
        if [set(r["left_out"]) for r in with_them.history] != [bad] * 3:
            yield f"{name}, {options}: left out {[r['left_out'] for r in with_them.history]}"
        else:
            yield "" if same(with_them, expected) else f"{name}, {options}, {bad}: other bits"


@fault("clients that never answer, 0 to 90 %", times=100, quick=10, seconds=10)
def dropped(times: int, rng: random.Random) -> Iterator[str]:
    """Below the quorum nothing changes, and the run comes to its end."""
    data = clients(set(), rng)
    for trial in range(times):
        name = NAMES[trial % len(NAMES)]
        quorum, share = rng.randint(1, 6), 0.9 * trial / max(1, times - 1)
        settings = prefed.Settings(
            rounds=10, local_steps=1, batch_size=3, device="cpu", seed=trial, client_dropout=share,
            quorum=quorum,
        )  # fmt: skip
        torch.manual_seed(trial)
        simulation = prefed.Simulation(
            prefed.ALGORITHMS.get(name)(),
            torch.nn.Linear(4, 1).double(),
            data,
            settings,
            loss=lambda out, y: (out**2).mean(),
        )
        problem = ""
        for _ in range(10):
            before = {n: v.clone() for n, v in simulation.snapshot().items()}
            record = simulation.run_round()
            few = 8 - len(record.get("dropped", [])) < quorum
            after = simulation.snapshot()
            moved = before.keys() != after.keys() or any(
                not torch.equal(before[n], after[n]) for n in before
            )
            if few == moved or few != record.get("skipped", False):
                problem = f"{name}: round {record['round']}: moved {moved} with {record}"
        yield problem
