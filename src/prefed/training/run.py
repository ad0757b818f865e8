"""A federated run: the one loop over rounds."""

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.errors import Diverged, Interrupted, PrefedError, checked
from prefed.core.machine import threads_for, torch_threads
from prefed.core.schedule import at
from prefed.data import FederatedData
from prefed.rules import State
from prefed.training.diagnostics import CollapseWatch, diagnose
from prefed.training.observers import Callback, Observers
from prefed.training.ranks import make_trainer
from prefed.training.round import (
    STEPS,
    Server,
    check_in_place,
    check_personal,
    check_sharing,
    client_state,
    server_update,
    traffic,
)
from prefed.training.settings import Settings
from prefed.training.task import EVALUATION_BATCH, Loss, Task, choose_device
from prefed.training.trainer import Arrived, Record, Trainer, check_fits

log = logging.getLogger("prefed")

MakeTrainer = Callable[[Algorithm, Task, FederatedData, Settings], Trainer]

OLD_NAMES = {"optimiser.steps_left": "optimiser.left"}
"""What checkpoints of earlier versions call a tensor."""


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
    client_model: Callable[[int], nn.Module]
    """The model that a client would use: the global one with the client's own parts."""


class Run:
    """A run that can be advanced round by round. Everything is checked before the first.

    make_trainer  where clients train, if not in this process or on the ranks it belongs to
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        data: FederatedData,
        settings: Settings,
        loss: Loss | str | None = None,
        make_trainer: MakeTrainer = make_trainer,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise PrefedError(f"algorithm: should be an Algorithm such as prefed.FedAvg(), "
                              f"not {type(algorithm).__name__}")  # fmt: skip
        if settings.clients_per_round is not None and settings.clients_per_round > len(data):
            raise PrefedError(
                f"clients_per_round: {settings.clients_per_round} is more than the "
                f"{len(data)} clients there are"
            )
        if isinstance(settings.weighting, list) and len(settings.weighting) != len(data):
            raise PrefedError(
                f"weighting: has {len(settings.weighting)} weights, but there are "
                f"{len(data)} clients; give one for each"
            )
        if settings.quorum > (asked := settings.clients_per_round or len(data)):
            raise PrefedError(f"quorum: {settings.quorum} is more than the {asked} of a cohort")
        self.algorithm, self.data, self.settings = algorithm, data, settings
        device = choose_device(settings.device)
        kind = settings.channels_last, settings.precision
        self.task = Task(model, loss, data, device, *kind, algorithm.personal)
        self.task.check(data)
        flat = self.task.flat
        check_sharing(algorithm, flat.shared)
        check_personal(algorithm, flat)
        check_in_place(algorithm, flat, settings.local_steps)
        self.trainer = make_trainer(algorithm, self.task, data, settings)
        self.server = Server.start(algorithm, flat.shared, flat.weights, flat.read_buffers())
        self.history: list[Record] = []
        self.is_whole = True
        """The state is that between two rounds; not while the server steps, or after a step
        that overflowed."""
        self.stopped_by: BaseException | None = None
        """Why the run ended before its last round."""
        self._is_prepared = self._stop_wanted = False
        self._evaluation_threads: int | None = None
        self._collapse = CollapseWatch(algorithm)

    def run(
        self, callbacks: Sequence[Callback] = (), config: Mapping[str, Any] | None = None
    ) -> Result:
        """All rounds that are left. `config` is what callbacks are told about the run."""
        if config is None:
            config = {"algorithm": self.algorithm.model_dump(), **self.settings.model_dump()}
        observers = Observers(callbacks)
        try:
            self.prepare()
            observers.start(self, dict(config))
            for record in self.rounds():
                observers.round(record)
                if self.trainer.stop_everywhere(self._stop_wanted) and not self.is_finished:
                    raise Interrupted(f"stopped after round {self.server.round}")
            result = self.result()
            observers.end(result)
        except BaseException as error:
            self.stopped_by = error
            if (another := observers.stop(error)) is not None:
                raise another from error
            raise
        return result

    def rounds(self, until: int | None = None) -> Iterator[Record]:
        """Run all rounds that are left, or those up to a number, and give the record of each."""
        last = self.settings.rounds if until is None else until
        while self.server.round < last:
            yield self.run_round()

    @property
    def is_finished(self) -> bool:
        return self.server.round >= self.settings.rounds

    def stop(self) -> None:
        """End the run after the round that is under way. It can be resumed."""
        self._stop_wanted = True

    def prepare(self) -> None:
        """Choose the engine, wait for nodes: what the first round would do otherwise."""
        if not self._is_prepared:
            self.trainer.prepare(self)
            self._evaluation_threads = threads_for(
                EVALUATION_BATCH * self.task.operations(self.data)
            )
            self._is_prepared = True

    def run_round(self) -> Record:
        """The next round."""
        self.prepare()
        with torch_threads(self.trainer.threads):
            return self._round()

    def _round(self) -> Record:
        """One round of the paper's outer loop."""
        start, round = time.perf_counter(), self.server.round
        algorithm, settings = self.algorithm, self.settings

        # 1. Draw the cohort, and who of it answers.
        cohort = self.draw_cohort()
        answers = draws.answering(settings.seed, round, cohort, settings.client_dropout)
        record = self._new_record(round, cohort, answers)
        largest = torch.finfo(self.server.weights.dtype).max
        if max(record["client_lr"], record["server_lr"]) > largest:
            raise self._diverged(record, start, "a step size is not finite")

        # 2. Train where the clients are. Their updates are admitted and averaged as they arrive.
        arrived = None
        if len(answers) >= settings.quorum:
            arrived = self.trainer.train(self.server, answers)
            record |= arrived.record

        # 3. Step the server, if enough clients have answered, and all with finite numbers.
        if arrived is not None and arrived.clients >= settings.quorum:
            record["train_loss"] = arrived.loss
            if not arrived.is_finite:
                what = "weights are" if math.isfinite(arrived.loss) else "training loss is"
                raise self._diverged(record, start, f"the {what} not finite")
            self._step(arrived)
            if not self.is_whole:
                raise self._diverged(record, start, "the weights are not finite")
        else:
            count = len(answers) if arrived is None else arrived.clients
            text = "round %d: %d answers, fewer than the quorum of %d; the model stays as it was"
            log.warning(text, round + 1, count, settings.quorum)
            record["skipped"] = True
            self.server.round += 1

        # 4. Diagnose the preconditioner.
        diagnosis = diagnose(algorithm, self.server, round)
        self._collapse.see(diagnosis)
        record |= diagnosis

        # 5. Evaluate.
        if self.trainer.leads and ((round + 1) % settings.evaluate_every == 0 or self.is_finished):
            record |= self.evaluate()
        record["seconds"] = time.perf_counter() - start
        self.history.append(record)
        return record

    def draw_cohort(self) -> list[int]:
        """The clients of the next round."""
        size = self.settings.clients_per_round
        return draws.cohort(self.settings.seed, self.server.round, len(self.data), size)

    def _new_record(self, round: int, cohort: list[int], answers: list[int]) -> Record:
        algorithm, steps = self.algorithm, self.settings.local_steps
        record: Record = {
            "round": round + 1,
            "train_loss": math.nan,
            "test_loss": None,
            "test_accuracy": None,
            **traffic(algorithm, self.server, len(cohort), steps, len(answers)),
            "client_lr": at(algorithm.client_lr, round),
            "server_lr": at(algorithm.server_lr, round),
            "cohort": cohort,
        }
        if len(answers) < len(cohort):
            record["dropped"] = sorted({*cohort} - {*answers})
        return record

    def _step(self, arrived: Arrived) -> None:
        """The server's step, which changes its state in place."""
        self.is_whole = False
        self.trainer.keep(self.server, arrived)
        share = arrived.clients / len(self.data)
        server_update(self.algorithm, self.server, arrived.mean, self.settings.local_steps, share)
        self.is_whole = bool(self.server.weights.isfinite().all())

    def evaluate(self) -> Record:
        """Loss of the global model on the test set, and accuracy if there are labels."""
        if self.data.test is None:
            return {}
        self._load()
        with torch_threads(self._evaluation_threads):
            loss, accuracy = self.task.evaluate(*self.data.test.all())
        return {"test_loss": loss, "test_accuracy": accuracy}

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next rounds depend on, by name. Not a copy: write it before going on."""
        server = self.server
        tensors = {"weights": server.weights, "buffers": server.buffers, "steps": server.steps}
        tensors |= {f"optimiser.{name}": value for name, value in server.optimiser.items()}
        tensors |= {f"shared.{name}": value for name, value in server.shared.items()}
        return tensors | self.trainer.state()

    def restore(
        self, tensors: Mapping[str, Tensor], history: list[Record], engine: str = ""
    ) -> None:
        """Go on from a snapshot that was taken after the rounds in `history`."""
        names = {new: old for new, old in OLD_NAMES.items() if old in tensors}
        tensors = {**tensors, **{new: tensors[old] for new, old in names.items()}}
        if "steps" not in tensors and "buffers" in tensors:  # from before constants stayed at home
            tensors["buffers"] = self.task.flat.buffers.from_before(tensors["buffers"])
            rounds = sum("skipped" not in record for record in history)
            tensors["steps"] = torch.tensor(rounds * self.settings.local_steps)
        here = self.snapshot()
        saved = {name: check_fits(name, tensors, value) for name, value in here.items()}
        self.trainer.load_state(tensors, engine)
        for name, value in here.items():
            value.copy_(saved[name])
        self.server.round, self.history = len(history), list(history)
        for record in history:
            self._collapse.see(record)

    @property
    def kept(self) -> dict[int, State]:
        """The state that clients keep, if it is held here."""
        return getattr(self.trainer, "kept", {})

    def result(self) -> Result:
        self._load()
        model = self.task.model()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
        return Result(weights, model, self.history, self.server, self.kept, self.client_model)

    def client_model(self, client: int) -> nn.Module:
        """The model that a client would use: the global one with its own parts, if it has any."""
        if not 0 <= client < len(self.data):
            raise PrefedError(f"client: {client} is none of the {len(self.data)} there are")
        self._load(client)
        model = self.task.model()
        self._load()
        return model

    def _load(self, client: int | None = None) -> None:
        """Put the global model, or that of a client, into the task."""
        server, flat, steps = self.server, self.task.flat, self.server.steps
        weights, buffers = client_state(server, {})
        if client is not None:
            weights, buffers = self.trainer.client_state(server, client)
            steps = self.kept.get(client, {}).get(STEPS, steps)
        flat.weights.copy_(weights)
        flat.write_buffers(buffers, steps)

    def _diverged(self, record: Record, start: float, what: str) -> Diverged:
        record |= {"diverged": what, "seconds": time.perf_counter() - start}
        self.history.append(record)
        rates = f"client_lr (now {record['client_lr']:g})"
        if self.algorithm.server_lr != 1.0:
            rates += f" or server_lr (now {record['server_lr']:g})"
        text = (
            f"round {record['round']}: {what} (loss {record['train_loss']:g}). Lower {rates}, "
            f"or set clip_norm. The state before this round is kept"
        )
        return Diverged(text, self.history)


Simulation = Run
"""The name of `Run` in earlier versions."""


def simulate(
    algorithm: Algorithm,
    model: nn.Module,
    data: FederatedData,
    *,
    loss: Loss | str | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Train `model` on `data` with `algorithm`; the model that is handed in stays as it is.

    algorithm          such as prefed.PreFed(client_lr=0.01)
    model              any torch.nn.Module
    data               a prefed.FederatedData
    loss               (output, y) -> one number, or a name: "cross_entropy", "mse", "bce"; None:
                       cross-entropy for labels, else squared error
    callbacks          see prefed.Callback
    """
    return Run(algorithm, model, data, checked(Settings, settings), loss).run(callbacks)


def _describe(function: Callable[..., Any]) -> None:
    """Give a function that takes `**settings` their names, types, defaults and descriptions."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    lines = [inspect.cleandoc(function.__doc__ or "")]
    for name, field in Settings.model_fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.default
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, field.annotation
        own.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        lines.append(f"{name:<18} {' '.join((field.description or '').split())}")
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    function.__doc__ = "\n".join(lines)


_describe(simulate)
