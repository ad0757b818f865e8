"""What secure aggregation costs a round, by the number of weights: time in stages, and bytes.

    python bench/secure_aggregation.py                     eight nodes, 1e5 and 1e7 weights
    python bench/secure_aggregation.py --nodes 20 --weights 1e6 --gone 4

One process plays the server and all nodes, with the records and the arrays that travel; there is no
training and no network. The node's times are the median over nodes: each would do its part by
itself. "plain" is what the same round takes without secure aggregation: arrays of float32 that the
server checks, adds up and divides.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord

from prefed.flower.secure import stages as m
from prefed.flower.secure.fixed_point import FixedPoint, bits_for
from prefed.flower.secure.party import Party
from prefed.flower.secure.session import Session

STAGES = (m.KEYS, m.SHARES, m.MASKED, m.UNMASK)
COMMON = bytes(32)


class Clock:
    def __init__(self) -> None:
        self.times: dict[tuple[str, str], list[float]] = {}

    def __call__(self, side: str, stage: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = work()
        self.times.setdefault((side, stage), []).append(time.perf_counter() - start)
        return found

    def node(self, stage: str) -> float:
        return statistics.median(self.times.get(("node", stage), [0.0]))

    def server(self, stage: str) -> float:
        return sum(self.times.get(("server", stage), []))


def sent(record: ConfigRecord) -> ConfigRecord:
    return ConfigRecord.inflate(record.deflate())


def secure(nodes: int, size: int, gone: int) -> tuple[Clock, Session, int]:
    clock, session = Clock(), Session(range(nodes), 0)
    parties = {number: Party() for number in range(nodes)}
    form = FixedPoint([size], [10], bits_for(nodes))
    values = np.random.default_rng(0).normal(scale=1e-3, size=size).astype(np.float32)
    sum_of_integers, vector_bytes = np.zeros(size, np.uint64), 0

    def mask(party: Party, ask: ConfigRecord) -> Array:
        party.take_shares(ask)
        integers = clock("node", "fixed point", lambda: form.encode(values)[0])
        vector = integers.view(np.uint64)
        np.add(sum_of_integers, vector, out=sum_of_integers)
        clock("node", "masks", lambda: party.mask(vector, COMMON))
        return Array(integers)

    session.common = COMMON
    for stage in STAGES:
        takes = {m.KEYS: session.take_keys, m.SHARES: session.take_shares,
                 m.UNMASK: session.take_secrets}  # fmt: skip
        for number in session.asked(stage)[gone if stage == m.MASKED else 0 :]:
            party, ask = parties[number], sent(session.ask(stage, number))
            if stage == m.MASKED:
                array = clock("node", stage, lambda p=party, a=ask: mask(p, a))
                vector_bytes = len(array.data)
                clock("server", stage, lambda n=number, a=array: session.take_vector(
                    n, a.numpy().view(np.uint64)))  # fmt: skip
                continue
            say = {m.KEYS: lambda p=party, a=ask, n=number: p.keys(a, n),
                   m.SHARES: lambda p=party, a=ask: p.shares(a),
                   m.UNMASK: lambda p=party, a=ask: p.unmask(a)}[stage]  # fmt: skip
            record = sent(clock("node", stage, say))
            clock("server", stage, lambda n=number, r=record, t=takes[stage]: t(n, r))
        session.check(stage)
    total = clock("server", "remove masks", session.unmask)
    assert np.array_equal(total, sum_of_integers)
    clock("server", "mean", lambda: form.decode(total.view(np.int64), nodes - gone))
    return clock, session, vector_bytes


def plain(nodes: int, size: int) -> tuple[float, int]:
    values = np.random.default_rng(0).normal(scale=1e-3, size=size).astype(np.float32)
    arrays, total = [Array(values) for _ in range(nodes)], np.zeros(size, np.float32)
    start = time.perf_counter()
    for array in arrays:
        total += array.numpy()
    total /= nodes
    return time.perf_counter() - start, len(arrays[0].data)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--nodes", type=int, default=8)
    words.add_argument("--weights", type=float, nargs="*", default=[1e5, 1e7])
    words.add_argument("--vectors", type=int, nargs="*", default=[1, 3], help="1: w; 3: w, m, P")
    words.add_argument("--gone", type=int, default=2, help="nodes that send shares and no vector")
    asked = words.parse_args()
    print(f"{asked.nodes} nodes, of which {asked.gone} drop out before they send their vector")
    print("weights vectors | node, s: keys shares fixed-point masks in-all(train stage) unmask "
          "| server, s: vectors remove-masks mean | plain server, s | bytes a node: vector (plain) "
          "keys | peak MB")  # fmt: skip
    for weights in asked.weights:
        for vectors in asked.vectors:
            size = int(weights) * vectors
            clock, session, vector = secure(asked.nodes, size, asked.gone)
            seconds, plain_bytes = plain(asked.nodes, size)
            node = [clock.node(s) for s in (m.KEYS, m.SHARES, "fixed point", "masks", *STAGES[2:])]
            server = [clock.server(s) for s in (m.MASKED, "remove masks", "mean")]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{weights:.0e} {vectors} | {' '.join(f'{s:.3f}' for s in node)} | "
                  f"{' '.join(f'{s:.3f}' for s in server)} | {seconds:.3f} | {vector} "
                  f"({plain_bytes}) {session.key_bytes // asked.nodes} | {peak:.0f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
