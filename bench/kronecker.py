"""A round of PreFed on the small CNN: Kronecker factors against the diagonal, refresh included.

    python bench/kronecker.py [--refresh 50 25] [--passes 5]

The workload is that of the preset cifar10-small (simple-cnn on 3 x 32 x 32, batches of 32, 50 local
steps) on made-up images: what is in them does not change the cost. Rounds run in turn in one
process, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import argparse

import torch

import prefed
from prefed.bench.ratios import interleaved

CLIENTS, SAMPLES, STEPS, BATCH = 10, 64, 50, 32


def simulation(shape: str, refresh: int, engine: str, side: int = 256) -> prefed.Simulation:
    generator = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.randn(SAMPLES, 3, 32, 32, generator=generator),
            torch.randint(10, (SAMPLES,), generator=generator),
        )
        for _ in range(CLIENTS)
    ]
    torch.manual_seed(0)
    model = prefed.MODELS.get("simple-cnn")(inputs=(3, 32, 32), classes=10)
    settings = prefed.Settings(
        rounds=1_000_000, local_steps=STEPS, batch_size=BATCH, device="cpu", engine=engine
    )
    algorithm = prefed.PreFed(
        shape=shape, refresh=refresh, largest_side=side, client_lr=1e-4, tau=0.1
    )
    return prefed.Simulation(algorithm, model, prefed.FederatedData(clients), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--refresh", type=int, nargs="+", default=[50])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--largest-side", type=int, default=256)
    parser.add_argument("--engine", default="sequential")
    chosen = parser.parse_args()
    rounds = {"diagonal": simulation("diagonal", 1, chosen.engine).run_round}
    for refresh in chosen.refresh:
        label = f"kronecker, refresh {refresh}"
        rounds[label] = simulation(
            "kronecker", refresh, chosen.engine, chosen.largest_side
        ).run_round
    times = interleaved(rounds, chosen.passes)
    print(
        f"simple-cnn, {CLIENTS} clients x {STEPS} steps of {BATCH}, "
        f"{torch.get_num_threads()} threads, median of {chosen.passes} rounds"
    )
    for label, seconds in times.items():
        print(
            f"{label:<24} {seconds:7.3f} s a round   {seconds / times['diagonal']:5.2f} x diagonal"
        )


if __name__ == "__main__":
    main()
