"""The ServerApp of a deployed config: the run that simulation has, with its clients elsewhere."""

import json
import math
import os
import secrets
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

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

from prefed.algorithms import Algorithm
from prefed.core.errors import Diverged, PrefedError, RunFailed
from prefed.core.safe_files import write_whole
from prefed.data import FederatedData
from prefed.experiments.config import load
from prefed.experiments.measures import describe
from prefed.experiments.run_directory import execute
from prefed.flower import protocol as p
from prefed.flower.arrivals import Arrivals, check_deployable
from prefed.flower.deployment_options import Options
from prefed.flower.kept_state import NEVER
from prefed.flower.nodes import Nodes, Partitions
from prefed.flower.replies import exchange
from prefed.flower.wire import pack, unpack_message
from prefed.rules import State
from prefed.training.admission import Admission, Refused, UntrustedUpdate, expected
from prefed.training.block_state import first_kept
from prefed.training.client_evaluation import ClientEvaluation, Score
from prefed.training.means.choice import Means
from prefed.training.messages import to_mean
from prefed.training.observers import Callback
from prefed.training.run import Run
from prefed.training.server_state import Server
from prefed.training.settings import Settings
from prefed.training.task import Task
from prefed.training.traffic import traffic
from prefed.training.trainer import Arrived, Record, Trainer

GRACE = 10.0
"""Seconds to save and end in, after the process that started this one is gone."""
END = ".end.json"
"""How a run ended that did not get to its last round, for whoever started it."""

PARTITIONS_FOUND = "partitions have a node"
"""In the log once training begins."""


@dataclass(eq=False)
class FlowerTrainer(Trainer):
    """Clients that live on Flower's nodes. What they keep stays there."""

    simulates = False
    algorithm: Algorithm
    task: Task
    data: FederatedData
    settings: Settings
    _: KW_ONLY
    grid: Grid
    config: str
    options: Options
    own_data: bool

    def __post_init__(self) -> None:
        check_deployable(self.algorithm, self.settings, len(self.data))
        self.means = Means.of(self.settings.mean, self.settings.state_mean)
        data, self.engine = self.data, "flower x 1"
        self.keeps = bool(first_kept(self.algorithm, self.task.flat))
        self.run = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
        """The name that nodes file kept state under: the same after a resume."""
        self.after = torch.full((len(data),), NEVER, dtype=torch.int64)
        """The round that each client last took part in: nodes go on from what they kept then."""
        self.partitions = Partitions(p.fingerprint(self.config), len(data))
        self.nodes = Nodes(self.partitions.identify)
        self.admitted: list[int] = []
        """The clients in the mean of the newest round."""

    def prepare(self, run: Run) -> None:
        self._wait(range(len(self.data)))
        there, count = len(self.nodes.nodes), self.partitions.count or "?"
        log(INFO, f"%d of %s {PARTITIONS_FOUND}", there, count)

    def _wait(self, clients: Sequence[int]) -> None:
        """Until each of these clients has its node, or the time to join is over."""
        self.nodes.wait(
            self.grid,
            lambda: all(self._node(c) is not None for c in clients),
            self.options.join_seconds,
        )

    def _node(self, client: int) -> int | None:
        """The node that a client lives on, if it is there."""
        partition = self.partitions.of(client)
        return None if partition is None else self.nodes.nodes.get(partition)

    def state(self) -> dict[str, Tensor]:
        return {"deployed.run": self.run, "deployed.after": self.after}

    def keep(self, server: Server, arrived: Arrived) -> None:
        self.after[self.admitted] = server.round
        self.admitted = []

    def train(self, server: Server, clients: list[int]) -> Arrived:
        options = self.options
        specs = expected(self.algorithm, server)
        samples = {} if self.own_data else {c: len(self.data.client(c)) for c in clients}
        admission = Admission(
            specs, server.round, clients, samples=samples, norm_cap=options.norm_cap
        )
        mean = self.means.collect(self.algorithm, server, len(clients), self.settings.seed)
        averaged = partial(self._averaged, server)
        arrivals = Arrivals(admission, clients, self.settings.weight, averaged, mean)
        broadcast = pack(server.broadcast(self.algorithm))
        needed = max(1, math.ceil(options.min_fraction * len(clients)))
        for attempt in range(1 + options.retries):
            if attempt:
                log(WARNING, "round %d: only %d of the %d clients it needs; asking again",
                    server.round + 1, len(admission.admitted), needed)  # fmt: skip
                self._wait(arrivals.missing)
            for client, reply in self._replies(server, arrivals.missing, broadcast):
                if isinstance(reply, Refused):
                    arrivals.refuse(client, reply)
                else:
                    self._take(server, arrivals, client, reply)
            if len(admission.admitted) >= needed:
                return self._arrived(server, arrivals)
            if arrivals.diverged:
                return Arrived({}, math.nan, len(clients))
        raise RunFailed(
            f"round {server.round + 1}: {len(admission.admitted)} of {len(clients)} clients sent a "
            f"usable update, {needed} are needed; the model is as it was after round "
            f"{server.round}. Repair the nodes and continue with --resume\n"
            + "\n".join(arrivals.reasons())
        )

    def _averaged(self, server: Server, update: UntrustedUpdate) -> State:
        """Its number of samples has been checked, and the steps follow from it."""
        steps = torch.tensor([self.settings.steps(update.samples)], dtype=torch.float64)
        values = to_mean(self.algorithm, dict(update.values), steps)
        return values if self.mechanism is None else self.mechanism.contribution(server, values)

    def _arrived(self, server: Server, arrivals: Arrivals) -> Arrived:
        values, loss = arrivals.mean.result()
        values = {name: value.to(self.task.device) for name, value in values.items()}
        self.admitted = sorted(arrivals.admission.admitted)
        came = traffic(self.algorithm, server, len(self.admitted), 0)
        record: Record = {key: n for key, n in came.items() if key.startswith("bytes_up")}
        if arrivals.refused:
            record["refused"] = {str(c): str(r) for c, r in sorted(arrivals.refused.items())}
        return Arrived(values, loss, len(self.admitted), record=record)

    def _replies(
        self,
        server: Server,
        clients: Sequence[int],
        broadcast: ArrayRecord,
        kind: str = MessageType.TRAIN,
    ) -> Iterator[tuple[int, RecordDict | Refused]]:
        """Ask these clients, and give what comes for each until the deadline: the reply of its
        node, valid until the next is asked for, or why there is none."""
        seconds, started = self.options.round_seconds, time.monotonic()
        self.nodes.refresh(self.grid, min(seconds, self.options.join_seconds))
        wanted: dict[int, list[int]] = {}
        for client in clients:
            node = self._node(client)
            if node is None:
                yield client, Refused("its node is not there")
            else:
                wanted.setdefault(node, []).append(client)
        left = max(1.0, seconds - (time.monotonic() - started))
        messages = [self._message(server, n, c, broadcast, kind, left) for n, c in wanted.items()]
        for message, reply in exchange(self.grid, messages, left):
            for client in wanted[message.metadata.dst_node_id]:
                yield client, reply if isinstance(reply, Refused) else reply.content
            if not isinstance(reply, Refused):
                reply.content.clear()  # Flower's records hold on to each other

    def _message(
        self,
        server: Server,
        node: int,
        clients: list[int],
        broadcast: ArrayRecord,
        kind: str,
        seconds: float,
    ) -> Message:
        ask = ConfigRecord(
            {
                p.ROUND: server.round,
                p.STEPS: int(server.steps),
                p.CLIENTS: clients,
                p.AFTER: [int(self.after[c]) for c in clients],
                p.RUN: bytes(self.run.tolist()).hex(),
                p.CONFIG: p.fingerprint(self.config),
            }
        )
        content = RecordDict({p.SERVER: broadcast, p.ASK: ask})
        group = str(server.round + 1)
        return Message(content, node, kind, ttl=seconds, group_id=group)

    def _take(self, server: Server, arrivals: Arrivals, client: int, content: RecordDict) -> None:
        def read() -> UntrustedUpdate:
            return read_update(self.algorithm, server, client, content)

        if arrivals.take(client, read) is not None:
            self._see_lost(client, content)

    def _see_lost(self, client: int, content: RecordDict) -> None:
        began, last = content[p.about_key(client)].get(p.AFTER), int(self.after[client])
        if self.keeps and began != last:
            log(WARNING, "client %d has lost what it kept in round %d and began anew",
                client, last + 1)  # fmt: skip

    def scores(self, evaluation: ClientEvaluation, clients: list[int]) -> dict[int, Score]:
        """From the nodes, of the clients that answer in time with what was asked for."""
        server, found = evaluation.run.server, {}
        known = {} if self.own_data else {c: len(self.data.client_test(c)) for c in clients}
        admission = Admission({}, server.round, clients, samples=known)
        broadcast = pack(evaluation.shown(server).broadcast(self.algorithm))
        for client, reply in self._replies(server, clients, broadcast, MessageType.EVALUATE):
            try:
                if isinstance(reply, Refused):
                    raise reply
                found[client] = read_score(evaluation, admission, client, reply)
                self._see_lost(client, reply)
            except Refused as reason:
                log(WARNING, "round %d, client %d is not evaluated: %s",
                    server.round, client, reason)  # fmt: skip
        return found


def read_update(
    algorithm: Algorithm, server: Server, client: int, content: RecordDict
) -> UntrustedUpdate:
    """What a node's reply holds for one of its clients."""
    about = content.get(p.about_key(client))
    if not isinstance(about, MetricRecord):
        raise Refused("it has no metrics")
    values = unpack_message(content.get(p.update_key(client)), algorithm, server)
    number, round, samples, loss = (about.get(k) for k in (p.CLIENT, p.ROUND, p.SAMPLES, p.LOSS))
    return UntrustedUpdate(number, round, samples, loss, values)


def read_score(
    evaluation: ClientEvaluation, admission: Admission, client: int, content: RecordDict
) -> Score:
    """The score in a node's reply for one of its clients, if it is accepted."""
    about = content.get(p.about_key(client))
    if not isinstance(about, MetricRecord):
        raise Refused("it has no metrics")
    number, round, samples, loss, accuracy = (
        about.get(k) for k in (p.CLIENT, p.ROUND, p.SAMPLES, p.EVALUATION_LOSS, p.ACCURACY)
    )
    if number != client:
        raise Refused(f"it speaks for client {number!r}")
    nothing = evaluation.may_ignore and loss is None and accuracy is None
    admission.admit(UntrustedUpdate(number, round, samples, 0.0 if nothing else loss, {}))
    if nothing:
        return math.nan, None
    assert isinstance(loss, float)
    if not evaluation.labelled and accuracy is None:
        return loss, None
    if not evaluation.labelled or not isinstance(accuracy, float) or not 0 <= accuracy <= 1:
        raise Refused(f"an accuracy of {accuracy!r}")
    return loss, accuracy


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


def trainer_class(options: Options) -> type[FlowerTrainer]:
    if not options.secure_aggregation:
        return FlowerTrainer
    from prefed.flower.secure.secure_trainer import SecureTrainer

    return SecureTrainer


def run(text: str, grid: Grid, run_config: dict[str, Any], own_data: bool = False) -> None:
    loaded = load(tomllib.loads(text))
    folder, options = Path(str(run_config["run-dir"])), Options.from_run_config(run_config)
    make_trainer = partial(
        trainer_class(options),
        grid=grid,
        config=text,
        options=options,
        own_data=own_data,
    )
    try:
        execute(
            loaded,
            folder,
            resume=bool(run_config.get("resume", False)),
            callbacks=[_Log(loaded.rounds)],
            make_trainer=make_trainer,
            seconds_between=0,  # rounds cost so much that each is worth a checkpoint
        )
    except (Diverged, PrefedError, RunFailed) as error:
        if folder.is_dir():
            kind = type(error).__name__
            write_whole(folder / END, json.dumps({"kind": kind, "message": str(error)}))
        raise
