"""What a server must take, on paper: 10,000 phones at work at a time, out of a million and more.

    python bench/internet.py            print the tables of docs/devices.md

By Little's law as many answers come in a second as there are clients in flight, over the mean time
of a job. That mean is over the built-in phones, with the exact bytes of an algorithm's messages.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import prefed
from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.models.resnet import resnet18
from prefed.training.messages import averaged
from prefed.training.server_state import Server
from prefed.training.task import Task
from prefed.training.traffic import traffic

IN_FLIGHT, SAMPLED, STEPS, BATCH = 10_000, 200_000, 10, 20
POPULATIONS = (10**6, 10**7, 10**8)
PHONES = prefed.Devices(classes={"phone": 1.0})
ALGORITHMS: dict[str, Algorithm] = {
    "FedAvg": prefed.FedAvg(client_lr=0.1),
    "FedAvg, int8": prefed.FedAvg(client_lr=0.1, upload="int8"),
    "FedAvgM": prefed.FedAvgM(client_lr=0.1),
    "FedAdam": prefed.FedAdam(client_lr=0.1),
    "PreFedOpt": prefed.PreFedOpt(client_lr=0.1),
    "PreFedLite": prefed.PreFedLite(client_lr=0.1),
    "PreFed": prefed.PreFed(client_lr=0.1),
    "SCAFFOLD": prefed.SCAFFOLD(client_lr=0.1),
}


def table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> str:
    torch.manual_seed(0)
    model = resnet18((3, 32, 32), 10)
    data = FederatedData([(torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64))])
    task = Task(model, None, data, torch.device("cpu"))
    operations, flat = task.operations(data), task.flat
    rows = [
        ["", "s a job", "answers / s", "MB / s up", "MB / s down", "10⁹ sums / s", "memory, GB"]
    ]
    often = [["", *(f"{n:.0e} devices".replace("1e+0", "10^") for n in POPULATIONS)]]
    for name, algorithm in ALGORITHMS.items():
        server = Server.start(algorithm, flat.shared, flat.weights, flat.read_buffers())
        size = traffic(algorithm, server, 1, STEPS)
        took = PHONES.seconds(
            0, 0, np.arange(SAMPLED), size["bytes_down"], STEPS, size["bytes_up"], STEPS * BATCH,
            operations,
        ).mean()  # fmt: skip
        answers = IN_FLIGHT / took
        values = averaged(algorithm, server).values()
        sums = answers * sum(value.numel() for value in values)
        held = {**server.optimiser, **server.shared, "weights": server.weights}
        state = sum(value.nbytes for value in held.values())
        # The mean holds a partial sum for each level of its tree, if answers come in order.
        parts = math.ceil(math.log2(IN_FLIGHT)) + 1
        memory = state + parts * sum(value.nbytes for value in values)
        up, down = (answers * size[key] / 1e6 for key in ("bytes_up", "bytes_down"))
        rows.append(
            [name, f"{took:.0f}", f"{answers:.0f}", f"{up:,.0f}", f"{down:,.0f}",
             f"{sums / 1e9:.2f}", f"{memory / 1e9:.2f}"]
        )  # fmt: skip
        often.append([name, *(f"{n / answers / 86400:.2g} d" for n in POPULATIONS)])
    return f"{table(rows)}\n\n{table(often)}"


if __name__ == "__main__":
    print(main())
