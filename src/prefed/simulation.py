"""A federated run on this machine: the loop over rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prefed import distributed, draws
from prefed.algorithms import Algorithm
from prefed.data import FederatedData
from prefed.diagnostics import CollapseWatch, diagnose
from prefed.engines import ENGINES
from prefed.engines.auto import Choice, choose
from prefed.engines.pool import Pool
from prefed.errors import Diverged, PrefedError, explain
from prefed.mean import Mean
from prefed.round import Server, check_sharing, first_kept, server_update, traffic
from prefed.rules.base import State
from prefed.schedule import at
from prefed.settings import Settings
from prefed.task import Loss, Task, choose_device

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


@dataclass
class Trained:
    """What the training of a cohort came to."""

    values: State
    """The mean of what the clients sent."""
    loss: float
    clients: int
    """How many of the cohort the mean speaks for."""
    kept: dict[int, State] = field(default_factory=dict)
    """What stays with the clients, if it is held here."""
    about: Record = field(default_factory=dict)
    """More for the record of the round."""


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
        loss: Loss = cross_entropy,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise PrefedError(f"algorithm: should be an Algorithm such as prefed.FedAvg(), "
                              f"not {type(algorithm).__name__}")  # fmt: skip
        if settings.clients_per_round is not None and settings.clients_per_round > len(data):
            raise PrefedError(
                f"clients_per_round: {settings.clients_per_round} is more than the "
                f"{len(data)} clients there are"
            )
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
        trained = self.train(cohort)
        train_loss = trained.loss

        record: Record = {
            "round": round + 1,
            "train_loss": train_loss,
            "test_loss": None,
            "test_accuracy": None,
            **traffic(algorithm, self.server, len(cohort), settings.local_steps),
            "client_lr": at(algorithm.client_lr, round),
            "server_lr": at(algorithm.server_lr, round),
            "cohort": cohort,
            **trained.about,
        }
        self.history.append(record)
        if not math.isfinite(train_loss):
            record["seconds"] = time.perf_counter() - start
            raise Diverged(self._advice(record), self.history)
        self.kept.update(trained.kept)
        participation = trained.clients / len(self.data)
        server_update(algorithm, self.server, trained.values, settings.local_steps, participation)
        diagnosis = diagnose(algorithm, self.server, round)
        self._collapse.see(diagnosis)
        record |= diagnosis
        due = (round + 1) % settings.evaluate_every == 0 or round + 1 == settings.rounds
        if due and distributed.rank() == 0:
            record |= self.evaluate()
        record["seconds"] = time.perf_counter() - start
        return record

    def train(self, cohort: list[int]) -> Trained:
        """The local updates of a cohort and their mean."""
        algorithm, settings = self.algorithm, self.settings
        mean, kept = Mean(), {}
        engine = self._engine(cohort)
        blocks = distributed.share(engine.blocks(algorithm, cohort))
        with torch.random.fork_rng(enabled=True):
            for first, update in engine.updates(algorithm, self.server, blocks, self.kept):
                clients = cohort[first : first + len(update.losses)]
                weights = [settings.weight(len(self.data.client(c))) for c in clients]
                mean.add_block(first, update.values, weights, update.losses.tolist())
                if update.kept:
                    for row, client in enumerate(clients):
                        kept[client] = {n: value[row].clone() for n, value in update.kept.items()}
        values, train_loss = distributed.mean(mean, self.server.averaged())
        kept = distributed.all_kept(kept, self._keeps)
        return Trained(values, train_loss, len(cohort), kept)

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
            self.engine = Pool(self.choice.engine, self.choice.workers, task, data, settings)
        return self.engine

    def evaluate(self) -> Record:
        """Loss and accuracy of the global model on the test set."""
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
            if name not in tensors or tensors[name].shape != value.shape:
                raise PrefedError(f"the saved state does not fit this run: {name}")
            value.copy_(tensors[name])
        clients = tensors.get("kept.clients", torch.empty(0)).tolist()
        fields = [n for n in tensors if n.startswith("kept.") and n != "kept.clients"]
        for row, client in enumerate(clients):
            self.kept[int(client)] = {
                name.removeprefix("kept."): tensors[name][row].to(self.task.device).clone()
                for name in fields
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

    def _advice(self, record: Record) -> str:
        rates = f"client_lr (now {record['client_lr']:g})"
        if self.algorithm.server_lr != 1.0:
            rates += f" or server_lr (now {record['server_lr']:g})"
        return (
            f"round {record['round']}: the training loss is not finite "
            f"({record['train_loss']}). Lower {rates}, or set clip_norm. The state before this "
            f"round is kept"
        )


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
    loss: Loss = cross_entropy,
    seed: int = 0,
    weighting: Literal["uniform", "samples"] = "uniform",
    engine: str = "auto",
    workers: int = 1,
    device: str = "auto",
    channels_last: bool = False,
    precision: Literal["float32", "bfloat16"] = "float32",
    evaluate_every: int = 1,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train `model` on `data` with `algorithm`; the model that is handed in stays as it is.

    clients_per_round  drawn anew in each round; None is everyone
    batch_size         drawn from a client's samples in each step; None is all of them
    batches            drawn with "replacement", or shuffled "epochs"
    weighting          of clients in the mean: "uniform", or by their number of "samples"
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
