"""What codecs cost: encoding and decoding, as a share of a round of the CNN workload (W2).

    python bench/codecs.py

The round is PreFed's on one core, without codecs, with the native engine. Each codec's time is that
of one vector for every client of the round, one client at a time: there and back in one process, in
C as that engine has it, and in two, as Flower has it, where a message is written and read.
PreFedLite's is the whole way of what it sends. Times are those of the processor, on one thread.
Rounds and codecs take turns, so that a slow moment hits both; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import prefed
from prefed.bench.workloads import w2
from prefed.codecs import codec
from prefed.codecs.interface import Blockwise
from prefed.core import draws
from prefed.core.hands import ALONE
from prefed.training.messages import exchange, receive, upload
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
        engine="native",
        device="cpu",
        evaluate_every=10**6,
    )
    simulation = prefed.Simulation(prefed.PreFed(client_lr=1e-4), load.model(), load.data, settings)
    layout = simulation.task.flat.layout
    change = 1e-3 * torch.randn(1, layout.size)
    P = change.pow(2) * torch.rand(1, layout.size)
    like, cohort = change[0], range(load.clients_per_round)

    mine = {True: change.clone(), False: P.clone()}  # what is sent lies there again

    def vector(name: str, in_one_process: bool) -> None:
        way = codec(name)
        x = change if way.signed else P
        for client in cohort:
            noise = draws.Noise(0, "codec", 0, [client])
            if in_one_process and isinstance(way, Blockwise):
                way.send(mine[way.signed], noise, ALONE)
            else:
                way.decode(way.encode(x, layout, noise), layout, like)

    lite = prefed.PreFedLite()
    server = Server.start(lite, layout, like, like[:0])

    likes = server.values(lite)
    values = {n: P if n == "P" else change[:, : v.numel()] for n, v in likes.items()}
    update = Update(values, {}, change[:, 0], [load.local_steps])
    own = replace(update, values={n: v.clone() for n, v in values.items()})

    def message(in_one_process: bool) -> None:
        for client in cohort:
            if in_one_process:
                exchange(lite, server, own, [client], {}, 0, ALONE)
            else:
                sent, _ = upload(lite, server, update, [client], {}, 0)
                receive(lite, server, sent)

    names = [name for name in prefed.CODECS.names() if name != "exact"]
    candidates: dict[str, Callable[[], object]] = {"round": simulation.run_round}
    for there, where in ((True, "one process"), (False, "two")):
        candidates |= {f"{name}, {where}": partial(vector, name, there) for name in names}
        candidates[f"PreFedLite, all it sends, {where}"] = partial(message, there)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(1 + PASSES):
        for name, run in candidates.items():
            start = time.process_time()
            run()
            if turn:  # the first makes room
                times[name].append(time.process_time() - start)
    round = statistics.median(times.pop("round"))
    print(f"{load.title}; d = {layout.size:,}, one core, median of {PASSES} passes")
    print(f"{'a round of PreFed':<40} {1e3 * round:8.1f} ms")
    for name, taken in times.items():
        median = statistics.median(taken)
        over = "   over the target of 5 %" if median > TARGET * round else ""
        print(f"{name:<40} {1e3 * median:8.1f} ms   {median / round:6.1%} of a round{over}")


if __name__ == "__main__":
    main()
