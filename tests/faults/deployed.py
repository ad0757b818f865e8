"""A deployed server and clients that mean it no good, or are many: real ClientApps and Flower's
serialisation in one process. What kills processes is in tests/flower/test_deploy.py."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from tests.faults.load import memory
from tests.faults.trials import fault, scratch


@fault("deployed: an update that is wrong", times=20, quick=3, seconds=15)
def refused(times: int, rng: random.Random) -> Iterator[str]:
    """NaN, wrong shapes and names, lies, negative P: the round is the one without that client."""
    from tests.helpers.federation import HOSTILE, Federation, config_of, poison, without

    kinds = list(HOSTILE)
    for number in range(times):
        what, victim = kinds[number % len(kinds)], rng.randrange(9)
        config = config_of({"name": "prefed"}, clients_per_round=9, rounds=1)
        with scratch() as folder:
            there = Federation(config, folder, tamper=poison(victim, what)).run()
        named = list(there.history[0].get("refused", {}))
        if named != [str(victim)]:
            yield f"{what} by client {victim}: refused {named}"
        elif not torch.equal(there.server.weights, without(config, victim).weights):
            yield f"{what} by client {victim} left a trace in the weights"
        else:
            yield ""


@fault("deployed: two hundred updates at once", times=3, quick=1, seconds=60)
def many(times: int, rng: random.Random) -> Iterator[str]:
    """All answers wait at the server together: same bits, one reply in memory at a time."""
    from tests.helpers.federation import Federation, config_of, simulated

    for name in ("fedavg", "prefed", "prefedlite")[:times]:
        split = {"name": "iid", "clients": 200}
        config = config_of(
            {"name": name}, rounds=1, clients_per_round=200, local_steps=1, batch_size=4,
            data={"name": "digits", "split": split}, model={"name": "mlp", "hidden": [512]},
        )  # fmt: skip
        with scratch() as folder:
            federation = Federation(config, folder, nodes=200, round_seconds=300.0)
            before = memory()
            there = federation.run()
            grown = memory() - before
        vector = there.server.weights.nbytes
        if not torch.equal(there.server.weights, simulated(config).server.weights):
            yield f"{name}: other bits than in simulation"
        elif federation.grid.most_pulled > 1 or grown > 100 * vector + 60e6:
            yield f"{name}: {grown / 1e6:.0f} MB for 200 updates of {vector / 1e6:.2f} MB"
        else:
            yield ""
