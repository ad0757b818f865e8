"""A federated run on this machine: the loop over rounds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from prefed import distributed, draws
from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.diagnostics import CollapseWatch, diagnose
from prefed.engines import ENGINES
from prefed.engines.auto import Choice, choose
from prefed.engines.pool import Pool
from prefed.errors import Diverged, PrefedError, explain
from prefed.exchange import averaged
from prefed.mean import Mean
from prefed.round import Server, Update, check_sharing, first_kept, server_update, traffic
from prefed.rules.base import State
from prefed.schedule import at
from prefed.settings import Settings
from prefed.task import Loss, Task, choose_device

log = logging.getLogger("prefed")

Record = dict[str, Any]
"""What is known of one round."""


@dataclass(frozen=True)
class Result:
    weights: Tensor
    """The final weights, flat, parameter by parameter in the model's order."""
    model: nn.Module
    """The model with the final weights."""
    history: list[Record]
    """One record a round."""
    server: Server
    """The final global state, with the optimiser state."""
    kept: dict[int, State]
    """The state that clients keep, for those that took part."""


class Callback:
    """Looks on while a run goes. Override what you need; the run does not change."""

    def on_start(self, config: dict[str, Any]) -> None:
        """Before the first round of this process, with plain values that say what is run."""

    def on_round(self, record: Record) -> None:
        """After each round."""

    def on_end(self, result: Result) -> None:
        """After the last round."""

    def on_stop(self, reason: str) -> None:
        """In place of on_end if the run did not get there: it diverged or was interrupted."""


@dataclass(frozen=True)
class Trained:
    """What the clients of a round have come to, before the server takes it."""

    values: State
    """The mean of what the clients sent."""
    loss: float
    clients: int
    """How many the mean speaks for."""
    kept: dict[int, State] = field(default_factory=dict)
    """What stays with the clients, if it is held here."""
    about: Record = field(default_factory=dict)
    """More for the record of the round."""

    @cached_property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(v.isfinite().all() for v in self.values.values())


class Simulation:
    """A run that can be advanced round by round. Everything is checked before the first."""

    save_every_round: ClassVar[bool] = False
    """Rounds cost so much that each is worth a checkpoint."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        data: FederatedData,
        settings: Settings,
        loss: Loss | None = None,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise PrefedError(f"algorithm: should be an Algorithm such as prefed.FedAvg(), "
                              f"not {type(algorithm).__name__}")  # fmt: skip
        if settings.clients_per_round is not None and settings.clients_per_round > len(data):
            raise PrefedError(
                f"clients_per_round: {settings.clients_per_round} is more than the "
                f"{len(data)} clients there are"
            )
        if settings.quorum > (asked := settings.clients_per_round or len(data)):
            raise PrefedError(f"quorum: {settings.quorum} is more than the {asked} of a cohort")
        self.algorithm, self.data, self.settings = algorithm, data, settings
        device = choose_device(settings.device)
        self.task = Task(model, loss, data, device, settings.channels_last, settings.precision)
        self.task.check(data)
        flat = self.task.flat
        check_sharing(algorithm, flat.layout)
        if settings.engine != "auto":
            ENGINES.get(settings.engine)  # a name that does not exist is told now
        self.choice: Choice | None = None
        """Engine and workers, known from the first round on; to go on with those of an earlier
        run, set them before."""
        self.engine: Pool | None = None
        self.server = Server.start(algorithm, flat.layout, flat.weights, flat.read_buffers())
        self.kept: dict[int, State] = {}
        self._keeps = first_kept(algorithm, flat.layout, flat.weights)
        self.history: list[Record] = []
        self._collapse = CollapseWatch(algorithm)

    def run_round(self) -> Record:
        """Cohort, local updates, mean, server update, evaluation."""
        start, round = time.perf_counter(), self.server.round
        algorithm, settings = self.algorithm, self.settings
        cohort = draws.cohort(settings.seed, round, len(self.data), settings.clients_per_round)
        answers = draws.answering(settings.seed, round, cohort, settings.dropout)
        record: Record = {
            "round": round + 1,
            "train_loss": math.nan,
            "test_loss": None,
            "test_accuracy": None,
            **traffic(algorithm, self.server, len(cohort), settings.local_steps, len(answers)),
            "client_lr": at(algorithm.client_lr, round),
            "server_lr": at(algorithm.server_lr, round),
            "cohort": cohort,
        }
        if len(answers) < len(cohort):
            record["dropped"] = sorted({*cohort} - {*answers})
        self.history.append(record)
        if (
            max(record["client_lr"], record["server_lr"])
            > torch.finfo(self.server.weights.dtype).max
        ):
            raise self._diverged(record, start, "a step size is not finite")

        trained = self.train(answers) if len(answers) >= settings.quorum else None
        if trained:
            record |= trained.about
        if trained and trained.clients >= settings.quorum:
            record["train_loss"] = trained.loss
            if not trained.is_finite:
                what = "weights are" if math.isfinite(trained.loss) else "training loss is"
                raise self._diverged(record, start, f"the {what} not finite")
            self.kept.update(trained.kept)
            share = trained.clients / len(self.data)
            server_update(algorithm, self.server, trained.values, settings.local_steps, share)
            if not self.server.weights.isfinite().all():
                raise self._diverged(record, start, "the weights are not finite")
        else:
            log.warning(
                "round %d: %d answers, fewer than the quorum of %d; the model stays as it was",
                round + 1, trained.clients if trained else len(answers), settings.quorum,
            )  # fmt: skip
            record["skipped"] = True
            self.server.round += 1
        diagnosis = diagnose(algorithm, self.server, round)
        self._collapse.see(diagnosis)
        record |= diagnosis
        due = (round + 1) % settings.evaluate_every == 0 or round + 1 == settings.rounds
        if due and distributed.rank() == 0:
            record |= self.evaluate()
        record["seconds"] = time.perf_counter() - start
        return record

    def train(self, clients: list[int]) -> Trained:
        """The local updates of these clients and their mean; nothing of the run is changed yet."""
        trained = self._train(clients)
        if trained.is_finite or self.settings.on_divergence == "stop":
            return trained
        bad = self._not_finite(clients)
        for client in bad:
            text = "round %d: client %d is left out: its update is not finite"
            log.warning(text, self.server.round + 1, client)
        rest = [client for client in clients if client not in bad]
        about = {"left_out": bad}
        if len(rest) < self.settings.quorum:
            return Trained({}, math.nan, len(rest), about=about)
        return replace(self._train(rest), about=about)

    def _updates(self, clients: list[int]) -> Iterator[tuple[int, Update]]:
        """The updates of this rank's share of the clients, with the place of each one's first."""
        if self.engine is None:
            self.prepare()
        engine = self.engine
        assert engine is not None
        blocks = distributed.share(engine.blocks(self.algorithm, clients))
        with torch.random.fork_rng(enabled=True):
            yield from engine.updates(self.algorithm, self.server, blocks, self.kept)

    def _train(self, clients: list[int]) -> Trained:
        """The mean over these clients, in a fixed order."""
        mean, kept = Mean(), {}
        for first, update in self._updates(clients):
            block = clients[first : first + len(update.losses)]
            weights = [self.settings.weight(len(self.data.client(c))) for c in block]
            mean.add_block(first, update.values, weights, update.losses.tolist())
            if update.kept:
                for row, client in enumerate(block):
                    kept[client] = {n: value[row].clone() for n, value in update.kept.items()}
        values, loss = distributed.mean(mean, averaged(self.algorithm, self.server))
        return Trained(values, loss, len(clients), distributed.all_kept(kept, self._keeps))

    def _not_finite(self, clients: list[int]) -> list[int]:
        """The clients whose updates are not finite.

        Clients are trained anew to find them, and once more without them: it is rare, the rounds
        in which nothing is wrong pay nothing, and the round is the one without them to the bit.
        In lockstep a client spoils the gradients of all, and the round is lost.
        """
        bad: list[int] = []
        for first, update in self._updates(clients):
            finite = update.losses.isfinite()
            for value in update.values.values():
                finite &= value.flatten(1).isfinite().all(1)
            bad += [clients[first + row] for row in finite.logical_not().nonzero().flatten()]
        return distributed.all_of(bad)

    def prepare(self) -> None:
        """Choose the engine, which the first round would do otherwise."""
        settings, clients = self.settings, len(self.data)
        self._engine(
            draws.cohort(settings.seed, self.server.round, clients, settings.clients_per_round)
        )

    def _engine(self, cohort: list[int]) -> Pool:
        """The engine of the run, chosen in its first round."""
        task, data, settings = self.task, self.data, self.settings
        if self.choice is None:
            decide = partial(choose, task, data, settings, self.algorithm, self.server)
            first = distributed.rank() == 0
            self.choice = Choice.parse(
                distributed.agree(str(decide(cohort, self.kept)) if first else "")
            )
        if self.engine is None:
            workers = min(self.choice.workers, len(cohort))  # more would have nothing to do
            self.engine = Pool(self.choice.engine, workers, task, data, settings)
        return self.engine

    def evaluate(self) -> Record:
        """Loss of the global model on the test set, and accuracy if there are labels."""
        if self.data.test is None:
            return {}
        self._load()
        loss, accuracy = self.task.evaluate(*self.data.test.all())
        return {"test_loss": loss, "test_accuracy": accuracy}

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next rounds depend on, by name. Not a copy: write it before going on."""
        server = self.server
        tensors = {"weights": server.weights, "buffers": server.buffers}
        tensors |= {f"optimiser.{name}": value for name, value in server.optimiser.items()}
        tensors |= {f"shared.{name}": value for name, value in server.shared.items()}
        clients = sorted(self.kept)
        if clients:
            tensors["kept.clients"] = torch.tensor(clients)
            for name in self.kept[clients[0]]:
                tensors[f"kept.{name}"] = torch.stack([self.kept[c][name] for c in clients])
        return tensors

    def restore(self, tensors: dict[str, Tensor], history: list[Record]) -> None:
        """Go on from a snapshot that was taken after the rounds in `history`."""
        here = self.snapshot()
        for name, value in here.items():
            if name not in tensors or not _alike(tensors[name], value):
                raise PrefedError(f"the saved state does not fit this run: {name}")
        clients = tensors.get("kept.clients", torch.empty(0, dtype=torch.int64))
        kept = {f"kept.{n}": v.expand(len(clients), *v.shape) for n, v in self._keeps.items()}
        for name, like in kept.items():
            if len(clients) and (name not in tensors or not _alike(tensors[name], like)):
                raise PrefedError(f"the saved state does not fit this run: {name}")
        for name, value in here.items():
            value.copy_(tensors[name])
        for row, client in enumerate(clients.tolist()):
            self.kept[client] = {
                name.removeprefix("kept."): tensors[name][row].to(self.task.device).clone()
                for name in kept
            }
        self.server.round, self.history = len(history), list(history)
        for record in history:
            self._collapse.see(record)

    def result(self) -> Result:
        self._load()
        model = self.task.model()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
        return Result(weights, model, self.history, self.server, self.kept)

    def _load(self) -> None:
        self.task.flat.weights.copy_(self.server.weights)
        self.task.flat.write_buffers(self.server.buffers)

    def _diverged(self, record: Record, start: float, what: str) -> Diverged:
        record |= {"diverged": what, "seconds": time.perf_counter() - start}
        rates = f"client_lr (now {record['client_lr']:g})"
        if self.algorithm.server_lr != 1.0:
            rates += f" or server_lr (now {record['server_lr']:g})"
        text = (
            f"round {record['round']}: {what} (loss {record['train_loss']:g}). Lower {rates}, "
            f"or set clip_norm. The state before this round is kept"
        )
        return Diverged(text, self.history)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def simulate(
    algorithm: Algorithm,
    model: nn.Module,
    data: FederatedData,
    *,
    rounds: int,
    local_steps: int,
    clients_per_round: int | None = None,
    batch_size: int | None = 32,
    batches: Literal["replacement", "epochs"] = "replacement",
    loss: Loss | None = None,
    seed: int = 0,
    weighting: Literal["uniform", "samples"] = "uniform",
    engine: str = "auto",
    workers: int = 1,
    device: str = "auto",
    channels_last: bool = False,
    precision: Literal["float32", "bfloat16"] = "float32",
    evaluate_every: int = 1,
    dropout: float = 0.0,
    quorum: int = 1,
    on_divergence: Literal["stop", "continue"] = "stop",
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train `model` on `data` with `algorithm`; the model that is handed in stays as it is.

    clients_per_round  drawn anew in each round; None is everyone
    batch_size         drawn from a client's samples in each step; None is all of them
    batches            drawn with "replacement", or shuffled "epochs"
    loss               (output, y) -> one number; None: cross-entropy for labels, else squared error
    weighting          of clients in the mean: "uniform", or by their number of "samples"
    dropout            the chance of each client of a cohort never to answer
    quorum             a round with fewer answers leaves the model as it was
    on_divergence      "stop", or "continue" without the clients whose updates are not finite
    callbacks          see prefed.Callback
    """
    try:
        settings = Settings(
            rounds=rounds,
            local_steps=local_steps,
            clients_per_round=clients_per_round,
            batch_size=batch_size,
            batches=batches,
            seed=seed,
            weighting=weighting,
            engine=engine,
            workers=workers,
            device=device,
            channels_last=channels_last,
            precision=precision,
            evaluate_every=evaluate_every,
            dropout=dropout,
            quorum=quorum,
            on_divergence=on_divergence,
        )
    except ValidationError as error:
        raise PrefedError("\n".join(explain(error, Settings))) from None
    simulation = Simulation(algorithm, model, data, settings, loss)
    for callback in callbacks:
        callback.on_start({"algorithm": algorithm.model_dump(), **settings.model_dump()})
    for _ in range(rounds):
        record = simulation.run_round()
        for callback in callbacks:
            callback.on_round(record)
    result = simulation.result()
    for callback in callbacks:
        callback.on_end(result)
    return result
