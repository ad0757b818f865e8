"""What it costs to evaluate 1,000 clients one by one, as a share of a training round of W1.

    python bench/clients.py

Rounds with and without it take turns, so that a busy moment of the machine hits both.
"""

from __future__ import annotations

import torch

from prefed.algorithms.fedavg import FedAvg
from prefed.bench.ratios import Round, interleaved
from prefed.bench.workloads import w1
from prefed.data import FederatedData
from prefed.training.run import Run
from prefed.training.settings import Settings


def main() -> None:
    torch.manual_seed(0)
    work = w1()
    held, model = work.data.hold_out(0.2), work.model()
    given = FederatedData(work.data.clients, client_tests=work.data.clients)
    runs: dict[str, Round] = {}
    kinds: list[tuple[str, FederatedData, int | None]] = [
        ("no evaluation", work.data, None),
        ("4 test samples each", held, None),
        ("20 test samples each", given, None),
        ("20 each, after 5 steps of fine-tuning", given, 5),
    ]
    for name, data, steps in kinds:
        settings = Settings(
            rounds=1_000_000, clients_per_round=work.clients_per_round, device="cpu",
            local_steps=work.local_steps, batch_size=work.batch_size, engine="vectorised",
            finetune_steps=steps,
        )  # fmt: skip
        runs[name] = Run(FedAvg(client_lr=0.05), model, data, settings).run_round
    times = interleaved(runs, 7)
    base = times["no evaluation"]
    print(f"{work.title}; all {len(work.data):,} clients are evaluated")
    for name, seconds in times.items():
        print(f"  {name:<40} {seconds:7.3f} s a round, evaluation {seconds / base - 1:5.2f} rounds")


if __name__ == "__main__":
    main()
