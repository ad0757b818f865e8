"""What codecs cost: encoding and decoding, as a share of a round of the CNN workload (W2).

    python bench/codecs.py

The round is PreFed's on one core, without codecs. Each codec's time is that of one vector for every
client of the round, one client at a time as the sequential engine has it; PreFedLite's is the whole
way of its message. Times are those of the processor, on one thread. Rounds and codecs take turns,
so that a slow moment hits both; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import prefed
from prefed.bench.workloads import w2
from prefed.codecs import codec
from prefed.core import draws
from prefed.training.messages import receive, upload
from prefed.training.round import Server, Update

PASSES = 7
TARGET = 0.05


def main() -> None:
    torch.set_num_threads(1)
    load = w2()
    settings = prefed.Settings(
        rounds=10**6,
        clients_per_round=load.clients_per_round,
        local_steps=load.local_steps,
        batch_size=load.batch_size,
        engine="sequential",
        device="cpu",
        evaluate_every=10**6,
    )
    simulation = prefed.Simulation(prefed.PreFed(client_lr=1e-4), load.model(), load.data, settings)
    layout = simulation.task.flat.layout
    change = 1e-3 * torch.randn(1, layout.size)
    P = change.pow(2) * torch.rand(1, layout.size)
    like, cohort = change[0], range(load.clients_per_round)

    def vector(name: str) -> None:
        way = codec(name)
        x = change if way.signed else P
        for client in cohort:
            noise = partial(draws.noise, 0, "codec", 0, [client])
            way.decode(way.encode(x, layout, noise), layout, like)

    lite = prefed.PreFedLite()
    server = Server.start(lite, layout, like, like[:0])

    likes = server.values(lite)
    values = {n: P if n == "P" else change[:, : v.numel()] for n, v in likes.items()}
    update = Update(values, {}, change[:, 0], [load.local_steps])

    def message() -> None:
        for client in cohort:
            sent, _ = upload(lite, server, update, [client], {}, 0)
            receive(lite, server, sent)

    names = [name for name in prefed.CODECS.names() if name != "exact"]
    candidates: dict[str, Callable[[], object]] = {"round": simulation.run_round}
    candidates |= {name: partial(vector, name) for name in names}
    candidates["PreFedLite, all it sends"] = message
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(1 + PASSES):
        for name, run in candidates.items():
            start = time.process_time()
            run()
            if turn:  # the first makes room
                times[name].append(time.process_time() - start)
    round = statistics.median(times.pop("round"))
    print(f"{load.title}; d = {layout.size:,}, one core, median of {PASSES} passes")
    print(f"{'a round of PreFed':<28} {1e3 * round:8.1f} ms")
    for name, taken in times.items():
        median = statistics.median(taken)
        over = "   over the target of 5 %" if median > TARGET * round else ""
        print(f"{name:<28} {1e3 * median:8.1f} ms   {median / round:6.1%} of a round{over}")


if __name__ == "__main__":
    main()
