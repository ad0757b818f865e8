"""The memory and the time of large models: python bench/large.py [MILLIONS ...] [--speed]

Memory: each run is a process of its own. What is printed is the most memory that it has held
(VmHWM) over what it held before the model was built, everything imported (VmRSS), in multiples of
the model's size: 4 bytes for each weight. Beside it stands the number of vectors of that size that
the algorithm cannot do without (prefed.training.vectors).

Speed: a round and a bare loop (flat vectors, the same batches and client rule, a running sum) take
turns in one process with one thread; processor time, the median of the turns' ratios.

The model is a GPT, its batches are 2 sequences of 16 symbols: small, so that what is done with
vectors counts beside the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import prefed
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.models.gpt import GPT
from prefed.training.batches import Batches
from prefed.training.vectors import needed

SIZES = {11: (384, 6, 1000), 44: (768, 6, 2000), 110: (768, 15, 4000)}
"""For millions of weights: the width, the blocks and the symbols of a GPT."""
LENGTH, COHORT = 16, 8
ALGORITHMS: dict[str, prefed.Algorithm] = {
    "FedAvg": prefed.FedAvg(client_lr=0.01),
    "FedAdam": prefed.FedAdam(client_lr=0.01, server_lr=1e-4),
    "PreFed": prefed.PreFed(client_lr=1e-5),
    "PreFedLite": prefed.PreFedLite(client_lr=1e-5),
}


def model(millions: int) -> nn.Module:
    width, layers, symbols = SIZES[millions]
    torch.manual_seed(0)
    return GPT([LENGTH], symbols, width=width, layers=layers, heads=width // 64)


def data(millions: int) -> prefed.FederatedData:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(SIZES[millions][2], (COHORT, 8, LENGTH + 1), generator=draw)
    clients = [(x[:, :-1], x[:, 1:]) for x in rows]
    return prefed.FederatedData(clients, test=clients[0])


def settings(rounds: int, steps: int, workers: int = 1) -> prefed.Settings:
    return prefed.Settings(
        rounds=rounds, local_steps=steps, batch_size=2, engine="sequential", workers=workers,
        device="cpu",
    )  # fmt: skip


# Memory


def status(key: str) -> int:
    """In bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def hold(name: str, millions: int, workers: int) -> None:
    """One run, and what it held: a line of JSON."""
    torch.set_num_threads(1)
    before = status("VmRSS")
    given, own = model(millions), data(millions)
    options = settings(2, 1, workers).model_dump(exclude_unset=True)
    result = prefed.simulate(ALGORITHMS[name], given, own, progress=False, **options)
    peak = status("VmHWM") - before
    layout = Layout.of(given.named_parameters())
    least = needed(ALGORITHMS[name], layout).of(workers)
    print(json.dumps({"vectors": peak / (4 * layout.size), "needed": least}))
    assert result.history


def warm_up() -> None:
    """Load what a run loads, so that a small model can be told from it."""
    clients = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))] * 2
    small = prefed.FederatedData(clients, test=clients[0])
    for name in ("FedAvg", "PreFedLite"):
        prefed.simulate(
            ALGORITHMS[name], nn.Linear(3, 2), small, progress=False, rounds=1, local_steps=1,
            batch_size=2, engine="sequential", workers=2, device="cpu",
        )  # fmt: skip


def memory(sizes: list[int]) -> None:
    print(
        "| | million weights | needed | 1 worker | needed | 2 workers |\n|---|---|---|---|---|---|"
    )
    for name in ALGORITHMS:
        for millions in sizes:
            row = []
            for workers in (1, 2):
                command = [sys.executable, __file__, "--hold", name, str(millions), str(workers)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                row += [f"{found['needed']:.0f}", f"{found['vectors']:.2f}"]
            print(f"| {name} | {millions} | {' | '.join(row)} |", flush=True)


# Speed


class Bare:
    """A round as somebody would write it who knows what flat vectors are. The client rule is the
    library's own, so that what differs is the rest of the round."""

    def __init__(self, algorithm: prefed.Algorithm, millions: int, steps: int) -> None:
        self.flat, self.data = FlatModel(model(millions)), data(millions)
        self.settings, self.rounds = settings(1, steps), 0
        self.rule = algorithm.client_rule().fused(self.flat.weights)
        self.lr = float(algorithm.client_lr)  # type: ignore[arg-type]
        fields = self.rule.fields(self.flat.layout)
        self.client = {"w": self.flat.weights}
        self.client |= {name: field.new(self.flat.weights) for name, field in fields.items()}
        self.server = {name: value.clone() for name, value in self.client.items()}
        self.sums = {name: torch.zeros_like(value) for name, value in self.client.items()}

    def round(self) -> None:
        for number in range(COHORT):
            for name, mine in self.client.items():
                mine.copy_(self.server[name])
            self.train(Batches(self.data.client(number), number, self.rounds, self.settings))
            for name, mine in self.client.items():
                self.sums[name].add_(mine) if number else self.sums[name].copy_(mine)
        for name, total in self.sums.items():
            torch.div(total, COHORT, out=self.server[name])
        self.rounds += 1

    def train(self, batches: Batches) -> None:
        state = dict(self.client)
        w, g = state.pop("w"), self.flat.gradient
        self.rule.begin(w, state)
        for k in range(len(batches)):
            x, y = batches[k]
            g.zero_()
            cross_entropy(self.flat.module(x), y).backward()
            self.rule.apply(w, g, state, self.lr, k)
        self.rule.finish(w, state, self.lr, len(batches))


def speed(name: str, millions: int, steps: int, passes: int) -> None:
    torch.set_num_threads(1)
    algorithm = ALGORITHMS[name]
    bare = Bare(algorithm, millions, steps)
    run = prefed.Run(algorithm, model(millions), data(millions), settings(1000, steps))
    run.data.test = None
    ours, times = run.run_round, list[tuple[float, float]]()
    for number in range(1 + passes):
        pair = timed(ours), timed(bare.round)
        if number:  # the first takes the memory
            times.append(pair)
    apart = (run.server.weights - bare.server["w"]).norm() / bare.server["w"].norm()
    ratio = statistics.median(a / b for a, b in times)
    mine, its = (statistics.median(t) for t in zip(*times, strict=True))
    cells = name, millions, steps, f"{its:.2f} s", f"{mine:.2f} s", f"{ratio:.3f}", f"{apart:.0e}"
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def timed(round: Callable[[], object]) -> float:
    start = time.process_time()
    round()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("millions", type=int, nargs="*", default=[11, 44, 110])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="local steps, for --speed")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--hold", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold(options.hold[0], *map(int, options.hold[1:]))
    elif options.speed:
        print("| | million weights | steps | bare | prefed | ratio | apart |")
        print("|---|---|---|---|---|---|---|")
        for name in ("FedAvg", "PreFed"):
            for millions in options.millions:
                speed(name, millions, options.steps, options.passes)
    else:
        memory(options.millions)


if __name__ == "__main__":
    main()
