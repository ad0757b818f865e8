"""Batches of several inputs on Flower: those of a deployed config, and of an app of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import prefed
import prefed.flower
from prefed.flower import protocol as p
from tests.helpers.federation import Federation, config_of, simulated, told_by_all
from tests.helpers.flower_apps import OPTIONS, STEPS, flat, run
from tests.helpers.loopback import LoopbackGrid
from tests.helpers.sentences import Reader, texts


def test_a_deployed_config_has_the_bits_of_simulation(tmp_path: Path) -> None:
    data = {"name": "tests.helpers.sentences:texts", "client_test": 0.3, "validation": 0.2}
    config = config_of(
        {"name": "prefed"},
        data=data | {"split": {"name": "iid", "clients": 9}},
        model={"name": "tests.helpers.sentences:reader"},
    )
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)
        assert ours["client_accuracies"] == theirs["client_accuracies"]


def test_local_train_takes_dicts_with_labels(tmp_path: Path) -> None:
    whole = texts()
    parts = torch.arange(60).split(20)
    data = prefed.FederatedData((whole.x, whole.y), parts=parts, pad=0)
    app = ClientApp()
    prefed.flower.tell_partition(app)

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return Reader().double()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = data.client(int(context.node_config[p.PARTITION])).all()
        batch: Any = {name: rows.padded() for name, rows in x.items()} | {"labels": y}
        reply: Message = prefed.flower.local_train(message, context, make(), [batch] * STEPS)
        return reply

    nodes = {n + 5: (app, {p.PARTITION: n, "state-dir": str(tmp_path / str(n))}) for n in range(3)}
    grid = LoopbackGrid(nodes, lambda node, message, reply: reply)
    strategy = prefed.flower.PreFed(client_lr=0.01, **OPTIONS)
    found = run(strategy, grid, 4, make)
    wanted = prefed.simulate(
        prefed.PreFed(client_lr=0.01), make(), data, rounds=4, local_steps=STEPS, batch_size=None,
        weighting="samples", engine="sequential",
    )  # fmt: skip
    torch.testing.assert_close(flat(found.arrays), wanted.weights, rtol=0, atol=1e-12)
