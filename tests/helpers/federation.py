"""A deployed config in one process: Flower's apps on a loopback grid."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import Array, Message, MetricRecord

from prefed.experiments.config import Config, load
from prefed.flower import protocol as p
from prefed.flower.client import client_app
from prefed.flower.deployment_options import Options
from prefed.flower.server import trainer_class
from prefed.training.mean import Mean
from prefed.training.round import Server, server_update
from prefed.training.run import Run
from tests.helpers.loopback import LoopbackGrid, Tamper
from tests.helpers.problems import local

CONFIG = {
    "rounds": 4,
    "clients_per_round": 4,
    "local_steps": 3,
    "batch_size": 8,
    "engine": "sequential",
    "data": {"name": "digits", "split": {"name": "dirichlet", "clients": 9, "alpha": 0.3}},
    "model": {"name": "mlp", "hidden": [8]},
}


def config_of(algorithm: dict[str, Any], **changes: Any) -> Config:
    return load({**CONFIG, **changes, "algorithm": algorithm})


def simulated(config: Config) -> Run:
    simulation = config.make_run()
    for _ in range(config.rounds):
        simulation.run_round()
    return simulation


class Federation:
    """A config, its nodes, and a server to run it."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        nodes: int = 3,
        tamper: Tamper | None = None,
        **options: Any,
    ) -> None:
        self.config, self.folder = config, folder
        folder.mkdir(exist_ok=True)
        self.path = folder / "app.toml"
        self.path.write_text(tomli_w.dumps(config.to_dict()))
        places = [
            {p.PARTITION: n, p.PARTITIONS: nodes, "state-dir": str(folder / f"node-{n}")}
            for n in range(nodes)
        ]
        # Node ids as Flower gives them: without any order.
        apps = {(7919 * n) % 1009 + 1: (client_app(self.path), c) for n, c in enumerate(places)}
        self.options = Options(**{"join_seconds": 2.0, "round_seconds": 20.0, **options})
        self.grid = LoopbackGrid(
            apps,
            tamper or (lambda node, message, reply: reply),
            run_config=self.options.to_run_config(),
        )

    def deployment(self) -> Run:
        made = self.config.make_run(
            partial(
                trainer_class(self.options),
                grid=self.grid,
                config=self.path.read_text(),
                options=self.options,
                own_data=False,
            )
        )
        made.prepare()
        return made

    def run(self, rounds: int | None = None) -> Run:
        deployment = self.deployment()
        for _ in range(rounds or self.config.rounds):
            deployment.run_round()
        return deployment


def told_by_all(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the clock and without what a deployment does not tell of single clients."""
    return {k: v for k, v in record.items() if k not in ("seconds", "drift", "update_norm")}


def poison(client: int, what: str) -> Tamper:
    """Make the update of one client, and of no other on its node, a hostile one."""

    def tamper(node: int, message: Message, reply: Message) -> Message:
        if reply.has_error() or p.about_key(client) not in reply.content:
            return reply
        arrays: Any = reply.content[p.update_key(client)]
        about: Any = reply.content[p.about_key(client)]
        if what == "nan":
            bad = arrays["weights/values"].numpy().copy()
            bad[0] = float("nan")
            arrays["weights/values"] = Array(bad)
        elif what == "shape":
            arrays["weights/values"] = Array(arrays["weights/values"].numpy()[:1])
        elif what == "name":
            arrays["more"] = arrays["weights/values"]
        elif what == "lying header":
            good = arrays["weights/values"]
            arrays["weights/values"] = Array("float32", good.shape, "numpy.ndarray", good.data[:-4])
        elif what == "negative P":
            arrays["P/values"] = Array(arrays["P/values"].numpy() - 1)
        elif what == "count":
            about[p.SAMPLES] = 10**12
        elif what == "round":
            about[p.ROUND] = about[p.ROUND] + 1
        elif what == "another":
            about[p.CLIENT] = client + 1
        elif what == "nothing":
            del reply.content[p.update_key(client)]
        elif what == "metrics":
            reply.content[p.about_key(client)] = MetricRecord({"loss": [1.0, 2.0]})
        return reply

    return tamper


HOSTILE = [
    "nan", "shape", "name", "lying header", "negative P", "count", "round", "another", "nothing",
    "metrics",
]  # fmt: skip


def without(config: Config, victim: int) -> Server:
    """The server after one round with everyone but the victim, worked out by hand."""
    here, everyone = config.make_run(), config.clients_per_round
    assert everyone is not None
    mean = Mean()
    workers = local(here).workers
    assert workers is not None
    engine = workers.engines[0]
    for client in range(everyone):
        if client != victim:
            update = engine.update(here.algorithm, here.server, [client], {})
            values = {n: v[0] for n, v in update.values.items()}
            mean.add(client, values, 1.0, float(update.losses[0]))
    share = (everyone - 1) / everyone
    server_update(here.algorithm, here.server, mean.result()[0], config.local_steps or 0, share)
    return here.server
