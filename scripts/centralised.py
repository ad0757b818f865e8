"""A plain PyTorch loop on the whole training set: what the model of a preset can reach.

    PREFED_DATA=... python scripts/centralised.py cifar10-small

As many gradient steps as the preset's clients take together, shuffled epochs, SGD with momentum
0.9 and a cosine from 0.01 to 0. Nothing of prefed but the data set and the model is used.
"""

from __future__ import annotations

import math
import sys

import torch
from torch.nn.functional import cross_entropy

from prefed.experiments.config import load


def main(preset: str) -> None:
    config = load(preset)
    simulation = config.make_run()
    dataset, _ = config.make_data()
    model, feed = simulation.task.flat.module.train(), dataset.transform
    assert dataset.test is not None
    assert feed is not None
    assert config.batch_size is not None
    steps = config.rounds * (config.clients_per_round or 1) * config.local_steps
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(0)
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < config.batch_size:
            order = torch.randperm(len(dataset.y))
        batch, order = order[: config.batch_size], order[config.batch_size :]
        optimiser.param_groups[0]["lr"] = 0.005 * (1 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        cross_entropy(model(feed(dataset.x[batch])), dataset.y[batch]).backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        guess = torch.cat([model(feed(x)).argmax(1) for x in dataset.test[0].split(1000)])
    print(f"{steps} steps: accuracy {(guess == dataset.test[1]).float().mean():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
