"""A federated run: the one loop over rounds."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.errors import Diverged, Interrupted, PrefedError
from prefed.core.losses import ignored_label, make_loss, reading
from prefed.core.machine import threads_for, torch_threads
from prefed.core.memory import all_finite
from prefed.core.parts import timed
from prefed.core.schedule import at
from prefed.data import FederatedData
from prefed.training import stragglers
from prefed.training.asynchronous import ONE_PROCESS
from prefed.training.attackers import Attackers
from prefed.training.block_state import client_state
from prefed.training.checks import check_settings, check_task
from prefed.training.client_evaluation import ClientEvaluation
from prefed.training.clock import Clock
from prefed.training.cohort import Cohort, ask
from prefed.training.diagnostics import CollapseWatch, diagnose
from prefed.training.evaluation import judge
from prefed.training.identity import identity
from prefed.training.kept import InMemory, Store
from prefed.training.means.choice import Means
from prefed.training.messages import mean_steps
from prefed.training.metrics import Metrics
from prefed.training.observers import Callback, Observers
from prefed.training.private_runs import make_mechanism, release
from prefed.training.ranks import make_trainer
from prefed.training.records import compact
from prefed.training.result import Result
from prefed.training.round import server_update
from prefed.training.run_goals import make_goals
from prefed.training.server_state import STEPS, Server
from prefed.training.settings import Settings
from prefed.training.snapshot import restore, snapshot
from prefed.training.task import Loss, Task, choose_device
from prefed.training.traffic import traffic
from prefed.training.trainer import Arrived, Record, Trainer
from prefed.training.training_objective import TrainingObjective

log = logging.getLogger("prefed")

MakeTrainer = Callable[[Algorithm, Task, FederatedData, Settings], Trainer]


class Run:
    """A run that can be advanced round by round. Everything is checked before the first.

    make_trainer  where clients train, if not in this process or on the ranks it belongs to
    config        the table that it was made from, if there is one
    """

    @timed("checks")
    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        data: FederatedData,
        settings: Settings,
        loss: Loss | str | Mapping[str, Any] | None = None,
        make_trainer: MakeTrainer = make_trainer,
        config: dict[str, Any] | None = None,
    ) -> None:
        check_settings(algorithm, data, settings)
        self.algorithm, self.settings = algorithm, settings
        self.task = Task(
            model,
            make_loss(**loss) if isinstance(loss, Mapping) else loss,
            data,
            choose_device(settings.device),
            settings.channels_last,
            settings.precision,
            algorithm.personal,
            micro_batch=settings.micro_batch,
            frozen=algorithm.freeze,
        )
        flat = self.task.flat
        check_task(algorithm, self.task, data, settings)
        self.attackers = Attackers.of(settings, len(data))
        """The clients that lie, if there are such."""
        if self.attackers is not None:
            self.attackers.check(algorithm, flat.shared)
        self.data = data if self.attackers is None else self.attackers.spoil(data)
        self._evaluation_threads = threads_for(
            self.task.evaluation_batch * self.task.operations(data)
        )
        self.trainer = make_trainer(algorithm, self.task, self.data, settings.with_workers())
        if settings.asynchronous is not None and not self.trainer.is_asynchronous:
            raise PrefedError(ONE_PROCESS)
        stragglers.check(settings, algorithm.client_rule().lockstep, self.trainer.simulates)
        self.clock = self._clock()
        """The virtual time of synchronous rounds; None if there is none."""
        self.server = Server.start(algorithm, flat.shared, flat.weights, flat.read_buffers())
        self._check_means()
        private = settings, len(data), not self.trainer.simulates
        self.mechanism = make_mechanism(algorithm, self.server, *private)
        """What makes the run private, if it is to be."""
        self.trainer.mechanism = self.mechanism
        self.config = config or identity(algorithm, flat.module, data, settings, loss)
        """What is run, as config.toml has it."""
        self.history: list[Record] = []
        self.is_whole = True
        """The state is that between two rounds; not while the server steps, or after a step
        that overflowed."""
        self.evaluate_from = 0
        """Rounds before this one are not evaluated: nobody asks for it."""
        self.stopped_by: BaseException | None = None
        """Why the run ended before its last round."""
        self._is_prepared = self._stop_wanted = False
        self.collapse = CollapseWatch(algorithm)
        self.client_evaluation = ClientEvaluation.of(self)
        """How clients are evaluated one by one; None if they are not."""
        self.objective = None if settings.objective is None else TrainingObjective(self)
        """How what is minimised is measured; None if it is not."""
        ignored = ignored_label(self.task.loss)
        meant = reading(self.task.loss)
        self.metrics = Metrics(settings.metrics, self.task.device, ignored, meant)
        self.best, self.stopper = make_goals(self) if self.trainer.leads else (None, None)
        """The best model so far, and what ends the run before its last round, if it should."""

    def _check_means(self) -> None:
        settings = self.settings
        clients = settings.clients_per_round or len(self.data)
        if settings.asynchronous is not None:
            clients = settings.asynchronous.buffer or clients
        means = Means.of(settings.mean, settings.state_mean)
        means.check(self.algorithm, self.server, clients, settings.weighting)

    def _clock(self) -> Clock | None:
        if (devices := self.settings.devices) is None or self.trainer.is_asynchronous:
            return None
        if not self.trainer.simulates:
            log.warning("devices: they are of simulations; here clients are real, and so is time")
            return None
        return Clock(devices, self.algorithm, self.task, self.data, self.settings)

    def run(
        self, callbacks: Sequence[Callback] = (), config: Mapping[str, Any] | None = None
    ) -> Result:
        """All rounds that are left. `config` is what callbacks are told about the run."""
        if config is None:
            config = self.config | self.settings.model_dump()
        observers = Observers(callbacks)
        try:
            self.prepare()
            observers.start(self, dict(config))
            if self.ended:
                log.info(
                    "the run has ended already, after round %d: %s", self.server.round, self.ended
                )
            for record in self.rounds():
                observers.round(record)
                stop = self.trainer.agree("stop" if self._stop_wanted else "")
                if stop and not self.is_finished:
                    self._stop_wanted = False
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
        while self.server.round < last and not self.ended:
            yield self.run_round()

    @property
    def rounds_left(self) -> int:
        return max(0, self.settings.rounds - self.server.round)

    @property
    def is_finished(self) -> bool:
        return not self.rounds_left or bool(self.ended)

    @property
    def ended(self) -> str:
        """Why there are no more rounds, by `stop_when` or for privacy; empty if there are."""
        said = str(self.history[-1].get("ended", "")) if self.history else ""
        if said or self.mechanism is None or not self.rounds_left:
            return said
        return self.mechanism.over(self.server.round)

    def stop(self) -> None:
        """End the run after the round that is under way. It can be resumed."""
        self._stop_wanted = True

    def prepare(self) -> None:
        """Choose the engine, wait for nodes: what the first round would do otherwise."""
        if not self._is_prepared:
            if self.mechanism is not None:
                self.mechanism.prepare()
            self.trainer.prepare(self)
            self._is_prepared = True

    def run_round(self) -> Record:
        """The next round."""
        self.prepare()
        with torch_threads(self.trainer.threads):
            return self._round()

    def _round(self) -> Record:
        """One round of the paper's outer loop."""
        start, round, settings = time.perf_counter(), self.server.round, self.settings

        # 1. Draw the cohort, and who of it answers.
        cohort = ask(self)
        record = self._new_record(cohort)
        largest = torch.finfo(self.server.weights.dtype).max
        if max(record["client_lr"], record["server_lr"]) > largest:
            raise self._diverged(record, start, "a step size is not finite")

        # 2. Train where the clients are. Their updates are admitted and averaged as they arrive.
        arrived = None
        if len(cohort.answers) >= settings.quorum:
            arrived = self.trainer.train(cohort.server, cohort.answers)
            record |= arrived.record
        arrived = release(self, record, arrived, cohort.clients)

        # 3. Step the server, if enough clients have answered, and all with finite numbers.
        if arrived is not None and arrived.clients >= settings.quorum:
            if wrong := self._step(record, cohort, arrived):
                raise self._diverged(record, start, wrong)
        else:
            count = len(cohort.answers) if arrived is None else arrived.clients
            text = "round %d: %d answers, fewer than the quorum of %d; the model stays as it was"
            log.warning(text, round + 1, count, settings.quorum)
            record["skipped"] = True
            self.trainer.skip(self.server)
            self.server.round += 1

        # 4. Diagnose the preconditioner.
        diagnosis = diagnose(self.algorithm, self.server, round)
        self.collapse.see(diagnosis)
        record |= diagnosis

        # 5. Evaluate. Is it good enough to end here, and the best so far?
        judge(self, record)
        record["seconds"] = time.perf_counter() - start
        self.history.append(compact(record))
        return self.history[-1]

    def draw_cohort(self) -> list[int]:
        """The clients of the next round."""
        if self.trainer.is_asynchronous:
            return self.trainer.arrivals(self.server)
        if self.mechanism is not None:
            return self.mechanism.draw_cohort(self.server.round)
        if self.clock is not None:
            return self.clock.begin(self.server.round, self.seconds_virtual)[1]
        size = self.settings.clients_per_round
        return draws.cohort(self.settings.seed, self.server.round, len(self.data), size)

    @property
    def seconds_virtual(self) -> float:
        """Virtual time since the start of the run, at the end of its last round."""
        return float(self.history[-1].get("seconds_virtual", 0.0)) if self.history else 0.0

    def _new_record(self, cohort: Cohort) -> Record:
        """What is known before clients train."""
        algorithm, clients, answers = self.algorithm, cohort.clients, cohort.answers
        steps, round = self.settings.local_steps or 0, self.server.round
        record: Record = {
            "round": round + 1,
            "train_loss": math.nan,
            "test_loss": None,
            "test_accuracy": None,
            **traffic(algorithm, self.server, len(clients), steps, len(answers)),
            "client_lr": at(algorithm.client_lr, round),
            "server_lr": at(algorithm.server_lr, round),
            "cohort": clients,
        }
        if len(answers) < len(clients):
            record["dropped"] = sorted({*clients} - {*answers})
        if self.attackers is not None:
            record["attackers"] = len(self.attackers.among(answers))
        return record | cohort.record

    def _step(self, record: Record, cohort: Cohort, arrived: Arrived) -> str:
        """The server's step, which changes its state in place. Returns what is not finite, before
        it or after it; empty if all is."""
        record["train_loss"] = arrived.loss if self.mechanism is None else math.nan
        if not arrived.is_finite:
            what = "weights are" if math.isfinite(arrived.loss) else "training loss is"
            return f"the {what} not finite"
        steps: float
        if self.settings.local_steps is not None and not cohort.server.limits:
            steps = self.settings.local_steps
        else:
            steps = mean_steps(arrived.mean)
            if self.mechanism is None:  # whose steps they are has no noise
                record["local_steps"] = steps
        self.is_whole = False
        self.trainer.keep(self.server, arrived)
        share = arrived.clients / len(self.data)
        server_update(self.algorithm, self.server, arrived.mean, steps, share)
        self.is_whole = all_finite(self.server.weights)
        return "" if self.is_whole else "the weights are not finite"

    @timed("evaluation")
    def evaluate(self) -> Record:
        """Loss of the global model on the test set, accuracy if there are labels, and metrics."""
        if self.data.test is None:
            return {}
        self._load()
        self.metrics.reset()
        with torch_threads(self._evaluation_threads):
            loss, accuracy = self.task.evaluate(*self.data.test.all(), self.metrics.update)
        return {"test_loss": loss, "test_accuracy": accuracy} | self.metrics.compute()

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next rounds depend on, by name. Not a copy: write it before going on."""
        return snapshot(self)

    def restore(
        self, tensors: Mapping[str, Tensor], history: list[Record], engine: str = ""
    ) -> None:
        """Go on from a snapshot that was taken after the rounds in `history`."""
        restore(self, tensors, history, engine)

    @property
    def kept(self) -> Store:
        """The state that clients keep, if it is held here."""
        held: Store | None = getattr(self.trainer, "kept", None)
        return InMemory() if held is None else held

    def model(self, best: bool = False) -> nn.Module:
        """A copy of the global model as it is now, or as it was in the best round so far."""
        self._load(best=best)
        return self.task.model()

    def client_model(self, client: int) -> nn.Module:
        """The model that a client would use: the global one with its own parts, if it has any."""
        if not 0 <= client < len(self.data):
            raise PrefedError(f"client: {client} is none of the {len(self.data)} there are")
        self._load(client)
        model = self.task.model()
        self._load()
        return model

    def result(self) -> Result:
        self.trainer.rest()
        model = self.model(best=True)
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
        round = (self.best.round or None) if self.best is not None else None
        of_clients = self.kept, self.client_model
        return Result(weights, model, self.history, self.server, *of_clients, round, self.config)

    def _load(self, client: int | None = None, best: bool = False) -> None:
        """Put the global model, of now or the best so far, or that of a client, into the task."""
        server = self.server
        if best and self.best is not None:
            server = self.best.of(server)
        weights, buffers, steps = *client_state(server, {}), server.steps
        if client is not None:
            weights, buffers = self.trainer.client_state(server, client)
            steps = self.kept.get(client, {}).get(STEPS, steps)
        self.task.flat.load(weights, buffers, steps)

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
