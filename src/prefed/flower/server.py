"""The ServerApp of a deployed config: the run that simulation has, with its cohorts elsewhere."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import tomllib
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log
from torch import Tensor

from prefed.admission import Admission, Arrived, Refused, expected
from prefed.algorithms import Algorithm
from prefed.cli.progress import describe
from prefed.config import load
from prefed.engines.auto import Choice
from prefed.errors import Diverged, PrefedError, RunFailed
from prefed.files import write_whole
from prefed.flower import protocol as p
from prefed.flower.exchange import exchange
from prefed.flower.gather import Gathering
from prefed.flower.kept import NEVER
from prefed.flower.nodes import Nodes
from prefed.flower.options import Options
from prefed.flower.wire import pack, unpack_message
from prefed.round import Server, traffic
from prefed.runs import execute
from prefed.simulation import Callback, Record, Simulation, Trained

GRACE = 10.0
"""Seconds to save and end in, after the process that started this one is gone."""
END = ".end.json"
"""How a run ended that did not get to its last round, for whoever started it."""


class Deployment(Simulation):
    """A run whose clients live on Flower's nodes. What they keep stays there."""

    save_every_round: ClassVar[bool] = True

    def __init__(
        self, *parts: Any, grid: Grid, config: str, options: Options, own_data: bool
    ) -> None:
        super().__init__(*parts)
        if self.algorithm.client_rule().lockstep:
            raise PrefedError(
                f"{type(self.algorithm).__name__}: its clients meet in every local step, which "
                f"would take a message per step; it runs in simulation only"
            )
        self.options, self.config = options, config
        self.own_data = own_data
        self.run = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
        """The name that nodes file kept state under: the same after a resume."""
        self.after = torch.full((len(self.data),), NEVER, dtype=torch.int64)
        """The round that each client last took part in: nodes go on from what they kept then."""
        self.nodes = Nodes(grid, p.fingerprint(config), len(self.data))
        self.grid = grid

    def prepare(self) -> None:
        self.choice = Choice("flower", 1)
        self.nodes.wait(range(len(self.data)), self.options.join_seconds)

    def snapshot(self) -> dict[str, Tensor]:
        return super().snapshot() | {"deployed.run": self.run, "deployed.after": self.after}

    def train(self, cohort: list[int]) -> Trained:
        server, settings, options = self.server, self.settings, self.options
        specs = expected(self.algorithm, server)
        samples = {} if self.own_data else {c: len(self.data.client(c)) for c in cohort}
        admission = Admission(
            specs, server.round, cohort, samples=samples, norm_cap=options.norm_cap
        )
        gathering = Gathering(admission, cohort, settings.weight, self.algorithm.before_mean)
        broadcast = pack(server.broadcast())
        needed = max(1, round_up(options.quorum * len(cohort)))
        for attempt in range(1 + options.retries):
            if attempt:
                log(WARNING, "round %d: only %d of the %d clients it needs; asking again",
                    server.round + 1, len(admission.admitted), needed)  # fmt: skip
                self.nodes.wait(gathering.missing, options.join_seconds)
            self._ask(gathering, broadcast)
            if len(admission.admitted) >= needed:
                return self._trained(gathering, cohort)
            if gathering.diverged:
                return Trained({}, float("nan"), len(cohort))
        raise RunFailed(
            f"round {server.round + 1}: {len(admission.admitted)} of {len(cohort)} clients sent a "
            f"usable update, {needed} are needed; the model is as it was after round "
            f"{server.round}. Mend the nodes and go on with --resume\n"
            + "\n".join(gathering.reasons())
        )

    def _trained(self, gathering: Gathering, cohort: list[int]) -> Trained:
        values, loss = gathering.mean.result()
        values = {name: value.to(self.task.device) for name, value in values.items()}
        admitted = sorted(gathering.admission.admitted)
        for client in admitted:
            self.after[client] = self.server.round
        came = traffic(self.algorithm, self.server, len(admitted), self.settings.local_steps)
        about: Record = {key: n for key, n in came.items() if key.startswith("bytes_up")}
        if gathering.refused:
            about["refused"] = {str(c): str(r) for c, r in sorted(gathering.refused.items())}
        return Trained(values, loss, len(admitted), about=about)

    def _ask(self, gathering: Gathering, broadcast: ArrayRecord) -> None:
        """Ask the clients whose update is missing, and take what comes until the deadline."""
        seconds, started = self.options.round_seconds, time.monotonic()
        self.nodes.refresh(min(seconds, self.options.join_seconds))
        wanted: dict[int, list[int]] = {}
        for client in gathering.missing:
            node = self.nodes.of(client)
            if node is None:
                gathering.refuse(client, Refused("its node is not there"))
            else:
                wanted.setdefault(node, []).append(client)
        left = max(1.0, seconds - (time.monotonic() - started))
        messages = [self._message(n, c, broadcast, left) for n, c in wanted.items()]
        for message, reply in exchange(self.grid, messages, left):
            for client in wanted[message.metadata.dst_node_id]:
                if isinstance(reply, Refused):
                    gathering.refuse(client, reply)
                else:
                    self._take(gathering, client, reply.content)
            if not isinstance(reply, Refused):
                reply.content.clear()  # Flower's records hold on to each other

    def _message(
        self, node: int, clients: list[int], broadcast: ArrayRecord, seconds: float
    ) -> Message:
        ask = ConfigRecord(
            {
                p.ROUND: self.server.round,
                p.CLIENTS: clients,
                p.AFTER: [int(self.after[c]) for c in clients],
                p.RUN: bytes(self.run.tolist()).hex(),
                p.CONFIG: p.fingerprint(self.config),
            }
        )
        content = RecordDict({p.SERVER: broadcast, p.ASK: ask})
        group = str(self.server.round + 1)
        return Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=group)

    def _take(self, gathering: Gathering, client: int, content: RecordDict) -> None:
        def read() -> Arrived:
            return read_update(self.algorithm, self.server, client, content)

        if gathering.take(client, read) is not None:
            began, last = content[p.about_key(client)].get(p.AFTER), int(self.after[client])
            if self._keeps and began != last:
                log(WARNING, "client %d has lost what it kept in round %d and began anew",
                    client, last + 1)  # fmt: skip


def read_update(algorithm: Algorithm, server: Server, client: int, content: RecordDict) -> Arrived:
    """What a node's reply holds for one of its clients."""
    about = content.get(p.about_key(client))
    if not isinstance(about, MetricRecord):
        raise Refused("it has no metrics")
    values = unpack_message(content.get(p.update_key(client)), algorithm, server)
    number, round, samples, loss = (about.get(k) for k in (p.CLIENT, p.ROUND, p.SAMPLES, p.LOSS))
    return Arrived(number, round, samples, loss, values)


def round_up(number: float) -> int:
    return -int(-number // 1)


class _Log(Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, record: Record) -> None:
        log(INFO, "round %d/%d  %s", record["round"], self.rounds, describe(record))


def server_app(config: str | Path, *, own_data: bool = False) -> ServerApp:
    """A ServerApp that runs the config in the file, into the run directory `run-dir` of the
    run config.

    own_data   nodes train on samples of their own, so their counts are not known here
    """
    app, text = ServerApp(), Path(config).read_text()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _end_with_parent()
        run(text, grid, dict(context.run_config), own_data)

    return app


def _end_with_parent() -> None:
    """Flower interrupts a ServerApp once when the process is gone that started it. If that hits it
    while it looks for the SuperLink, which is gone too, it would do so for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(text: str, grid: Grid, run_config: dict[str, Any], own_data: bool = False) -> None:
    loaded = load(tomllib.loads(text))
    folder = Path(str(run_config["run-dir"]))
    make = partial(
        Deployment,
        grid=grid,
        config=text,
        options=Options.from_run_config(run_config),
        own_data=own_data,
    )
    try:
        execute(
            loaded,
            folder,
            resume=bool(run_config.get("resume", False)),
            callbacks=[_Log(loaded.rounds)],
            make=make,
        )
    except (Diverged, PrefedError, RunFailed) as error:
        if folder.is_dir():
            kind = type(error).__name__
            write_whole(folder / END, json.dumps({"kind": kind, "message": str(error)}))
        raise
