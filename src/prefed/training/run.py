"""A federated run: the one loop over rounds."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.errors import Diverged, Interrupted, PrefedError
from prefed.core.losses import by_targets, ignored_label, is_one_of, make_loss, squared_error
from prefed.core.machine import threads_for, torch_threads
from prefed.core.memory import all_finite
from prefed.core.parts import timed
from prefed.core.schedule import at
from prefed.data import FederatedData
from prefed.training import stragglers
from prefed.training.attackers import Attackers
from prefed.training.block_state import client_state
from prefed.training.checks import (
    check_in_place,
    check_parts,
    check_sharing,
    check_single_samples,
)
from prefed.training.client_evaluation import ClientEvaluation
from prefed.training.clock import Clock
from prefed.training.diagnostics import CollapseWatch, diagnose
from prefed.training.goals import Best, Goal, Stopper
from prefed.training.identity import identity
from prefed.training.kept import InMemory, Store
from prefed.training.means.choice import Means
from prefed.training.mechanism import Mechanism
from prefed.training.messages import mean_steps
from prefed.training.metrics import Metrics
from prefed.training.observers import Callback, Observers
from prefed.training.other_gradients import check_other
from prefed.training.private_runs import make_mechanism
from prefed.training.ranks import make_trainer
from prefed.training.records import compact
from prefed.training.result import Result
from prefed.training.round import server_update
from prefed.training.server_state import STEPS, Server
from prefed.training.settings import Settings
from prefed.training.task import Loss, Task, choose_device
from prefed.training.traffic import traffic
from prefed.training.trainer import Arrived, Record, Trainer, check_fits
from prefed.training.training_objective import TrainingObjective

log = logging.getLogger("prefed")

MakeTrainer = Callable[[Algorithm, Task, FederatedData, Settings], Trainer]

UNNOISED = ("update_norm", "drift", "left_out", "refused")
"""What a trainer says of single clients or of a mean without noise."""

OLD_NAMES = {"optimiser.steps_left": "optimiser.left"}
"""What checkpoints of earlier versions call a tensor."""

ONE_PROCESS = (
    "asynchronous: is for simulations in one process, not for several ranks (torchrun) and not for "
    "Flower's nodes; leave it out, or set workers in place of ranks"
)


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
        if not isinstance(algorithm, Algorithm):
            raise PrefedError(f"algorithm: should be an Algorithm such as prefed.FedAvg(), "
                              f"not {type(algorithm).__name__}")  # fmt: skip
        if not isinstance(data, FederatedData):
            raise PrefedError(
                f"data: should be a prefed.FederatedData, as prefed.FederatedData([(x, y), ...]), "
                f"not {type(data).__name__}"
            )
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
        if settings.local_epochs is not None and algorithm.client_rule().lockstep:
            raise PrefedError(
                f"local_epochs: clients of {type(algorithm).__name__} meet in every step, so all "
                f"of them take equally many; set local_steps"
            )
        self.algorithm, self.data, self.settings = algorithm, data, settings
        device = choose_device(settings.device)
        kind = settings.channels_last, settings.precision
        parts: dict[str, Any] = {"personal": algorithm.personal, "frozen": algorithm.freeze}
        parts["micro_batch"] = settings.micro_batch
        made = make_loss(**loss) if isinstance(loss, Mapping) else loss
        self.task = Task(model, made, data, device, *kind, **parts)
        flat = self.task.flat
        with torch_threads(1):
            self.task.check(data)
            check_single_samples(self.task, settings, data)
            check_sharing(algorithm, flat.shared)
            check_parts(algorithm, flat)
            check_other(algorithm, self.task, data)
            check_in_place(algorithm, flat, settings.steps(len(data.client(0))))
        self.attackers = Attackers.of(settings, len(data))
        """The clients that lie, if there are such."""
        if self.attackers is not None:
            self.attackers.check(algorithm, flat.shared)
            self.data = self.attackers.spoil(data)
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
        means = Means.of(settings.mean, settings.state_mean)
        if settings.asynchronous is not None:
            asked = settings.asynchronous.buffer or asked
        means.check(algorithm, self.server, asked, settings.weighting)
        private = settings, len(data), not self.trainer.simulates
        self.mechanism = make_mechanism(algorithm, self.server, *private)
        """What makes the run private, if it is to be."""
        self.trainer.mechanism = self.mechanism
        self.config = config or identity(algorithm, self.task.flat.module, data, settings, loss)
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
        self._collapse = CollapseWatch(algorithm)
        self.client_evaluation = self._client_evaluation()
        """How clients are evaluated one by one; None if they are not."""
        self.objective = None if settings.objective is None else TrainingObjective(self)
        """How what is minimised is measured; None if it is not."""
        numbers = is_one_of(self.task.loss, (by_targets, squared_error))
        self.metrics = Metrics(settings.metrics, device, ignored_label(self.task.loss), numbers)
        self.best: Best | None = None
        """The round with the best model, if it is to be kept."""
        self._best_state: dict[str, Tensor] = {}
        self._stopper: Stopper | None = None
        if self.trainer.leads:
            self._set_goals()

    def _clock(self) -> Clock | None:
        if (devices := self.settings.devices) is None or self.trainer.is_asynchronous:
            return None
        if not self.trainer.simulates:
            log.warning("devices: they are of simulations; here clients are real, and so is time")
            return None
        return Clock(devices, self.algorithm, self.task, self.data, self.settings)

    def _client_evaluation(self) -> ClientEvaluation | None:
        if self.data.client_tests is None:
            for name in ("evaluate_clients", "evaluate_clients_every", "finetune_steps"):
                if getattr(self.settings, name) is not None:
                    raise PrefedError(
                        f"{name}: clients have no test samples of their own; set data.client_test, "
                        f"or in Python use data.hold_out(0.2) or FederatedData(..., client_tests=)"
                    )
            if self.server.personal.numel() and self.data.test is not None and self.trainer.leads:
                log.warning(
                    "the test set is evaluated with the global model, whose personal parts nobody "
                    "trains; set data.client_test = 0.2 (in Python data.hold_out(0.2)) to evaluate "
                    "each client with its own"
                )
            return None
        if (self.settings.evaluate_clients or 0) > len(self.data):
            raise PrefedError(
                f"evaluate_clients: {self.settings.evaluate_clients} is more than the "
                f"{len(self.data)} clients there are"
            )
        return ClientEvaluation(self)

    def _set_goals(self) -> None:
        """One evaluation before the first round shows whether metrics work, and what they give."""
        settings = self.settings
        if not (settings.metrics or settings.keep or settings.stop_when or self.client_evaluation):
            return
        if settings.metrics and self.data.test is None:
            raise PrefedError("metrics: there is no test set to compute them on; give data a test")
        found = self.evaluate() | (
            self.client_evaluation.try_out() if self.client_evaluation else {}
        )
        numbers = [key for key, value in found.items() if isinstance(value, float)]
        known = ["train_loss", *numbers]
        if settings.keep:
            self.best = Best(Goal(settings.keep))
            self.best.goal.resolve("keep", known)
        if settings.stop_when:
            self._stopper = Stopper(settings.stop_when, known)

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
    def is_finished(self) -> bool:
        return self.server.round >= self.settings.rounds or bool(self.ended)

    @property
    def ended(self) -> str:
        """Why there are no more rounds, by `stop_when` or for privacy; empty if there are."""
        said = str(self.history[-1].get("ended", "")) if self.history else ""
        return said or self._over_budget()

    def _over_budget(self) -> str:
        """Why privacy allows no further round, if there should be one; empty if it does."""
        is_last = self.server.round >= self.settings.rounds
        return "" if self.mechanism is None or is_last else self.mechanism.over(self.server.round)

    @property
    def rounds_left(self) -> int:
        return max(0, self.settings.rounds - self.server.round)

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
        start, round = time.perf_counter(), self.server.round
        algorithm, settings = self.algorithm, self.settings

        # 1. Draw the cohort, and who of it answers.
        cohort = self.draw_cohort()
        answers = cohort
        if not self.trainer.is_asynchronous:
            answers = draws.answering(settings.seed, round, cohort, settings.client_dropout)
        server, told = self.server, self.trainer.told(self.server)
        answers, limits = stragglers.slowed(settings, self.data, round, cohort, answers)
        if limits:
            server, told = replace(server, limits=limits), told | {"partial": len(limits)}
        if self.clock is not None:
            began, _ = self.clock.begin(round, self.seconds_virtual)
            closed = self.clock.close(server, began, cohort, answers)
            answers, told = closed.answers, closed.record
            server = replace(server, limits=closed.limits)
        record = self._new_record(round, cohort, answers) | told
        largest = torch.finfo(self.server.weights.dtype).max
        if max(record["client_lr"], record["server_lr"]) > largest:
            raise self._diverged(record, start, "a step size is not finite")

        # 2. Train where the clients are. Their updates are admitted and averaged as they arrive.
        arrived = None
        if len(answers) >= settings.quorum:
            arrived = self.trainer.train(server, answers)
            record |= arrived.record
        if self.mechanism is not None:
            arrived = self._release(self.mechanism, record, arrived, cohort)

        # 3. Step the server, if enough clients have answered, and all with finite numbers.
        if arrived is not None and arrived.clients >= settings.quorum:
            record["train_loss"] = arrived.loss if self.mechanism is None else math.nan
            if not arrived.is_finite:
                what = "weights are" if math.isfinite(arrived.loss) else "training loss is"
                raise self._diverged(record, start, f"the {what} not finite")
            steps: float
            if settings.local_steps is not None and not server.limits:
                steps = settings.local_steps
            else:
                steps = mean_steps(arrived.mean)
                if self.mechanism is None:  # whose steps they are has no noise
                    record["local_steps"] = steps
            self._step(arrived, steps)
            if not self.is_whole:
                raise self._diverged(record, start, "the weights are not finite")
        else:
            count = len(answers) if arrived is None else arrived.clients
            text = "round %d: %d answers, fewer than the quorum of %d; the model stays as it was"
            log.warning(text, round + 1, count, settings.quorum)
            record["skipped"] = True
            self.trainer.skip(self.server)
            self.server.round += 1

        # 4. Diagnose the preconditioner.
        diagnosis = diagnose(algorithm, self.server, round)
        self._collapse.see(diagnosis)
        record |= diagnosis

        # 5. Evaluate. Is it good enough to end here, and the best so far?
        is_last = self.server.round >= settings.rounds
        done = self._evaluate_if_due(record, is_last)
        if settings.stop_when and not is_last:
            reason = self._stopper.see(record) if self._stopper else ""
            if reason := self.trainer.agree(reason):
                self._evaluate_if_due(record, True, done)
                record["ended"] = reason
        if "ended" not in record and (reason := self._over_budget()):
            self._evaluate_if_due(record, True, done)
            record["ended"] = reason
        if self.best is not None and self.best.see(record):
            weights, buffers = self.server.model()
            self._best_state = {
                "best.weights": weights.clone(),
                "best.buffers": buffers.clone(),
                "best.steps": self.server.steps.clone(),
            }
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

    def _new_record(self, round: int, cohort: list[int], answers: list[int]) -> Record:
        algorithm, steps = self.algorithm, self.settings.local_steps or 0
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
        if self.attackers is not None:
            record["attackers"] = len(self.attackers.among(answers))
        return record

    def _release(
        self, mechanism: Mechanism, record: Record, arrived: Arrived | None, cohort: list[int]
    ) -> Arrived | None:
        """What a private run goes on with: noise on what arrived, which may be nothing. The ledger
        comes first. Of what clients sent, records have what was noised and no more."""
        for key in [key for key in record if key in UNNOISED]:
            del record[key]
        quorum = self.settings.quorum
        if quorum > 1 and (arrived is None or arrived.clients < quorum):
            return arrived
        record |= mechanism.spend(self.server.round + 1, cohort)
        here, asked = arrived or Arrived({}, 0.0, 0), mechanism.cohort
        mean = mechanism.release(self.server, here.mean, here.clients, asked)
        record["update_norm"] = float(torch.linalg.vector_norm(mean["weights"]))
        return replace(here, mean=mean, loss=0.0, clients=asked)

    def _step(self, arrived: Arrived, steps: float) -> None:
        """The server's step, which changes its state in place."""
        self.is_whole = False
        self.trainer.keep(self.server, arrived)
        share = arrived.clients / len(self.data)
        server_update(self.algorithm, self.server, arrived.mean, steps, share)
        self.is_whole = all_finite(self.server.weights)

    def _evaluate_if_due(
        self, record: Record, is_last: bool, done: Collection[str] = ()
    ) -> list[str]:
        """Add what is due in this round, and is not done yet; returns what is done."""
        if not self.trainer.leads:
            return []
        kinds = {"all": (self.settings.evaluate_every, self.evaluate)}
        if (clients := self.client_evaluation) is not None:
            kinds["clients"] = (clients.every, clients.evaluate)
        if self.objective is not None:
            kinds["objective"] = (self.settings.evaluate_every, self._measure)
        round, late = self.server.round, self.server.round >= self.evaluate_from
        due = [k for k, (every, _) in kinds.items() if is_last or (late and not round % every)]
        for kind in due:
            record |= kinds[kind][1]() if kind not in done else {}
        return due

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

    def _measure(self) -> Record:
        """What is minimised, at the global model."""
        assert self.objective is not None
        self._load()
        return self.objective.evaluate()

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next rounds depend on, by name. Not a copy: write it before going on."""
        server = self.server
        tensors = {"weights": server.weights, "buffers": server.buffers, "steps": server.steps}
        tensors |= {f"optimiser.{name}": value for name, value in server.optimiser.items()}
        tensors |= {f"shared.{name}": value for name, value in server.shared.items()}
        tensors |= {f"mean_of_rounds.{name}": value for name, value in server.over_rounds.items()}
        if self.mechanism is not None:
            tensors["privacy.clip"] = self.mechanism.clip
        return tensors | self._best_state | self.trainer.state()

    def restore(
        self, tensors: Mapping[str, Tensor], history: list[Record], engine: str = ""
    ) -> None:
        """Go on from a snapshot that was taken after the rounds in `history`."""
        names = {new: old for new, old in OLD_NAMES.items() if old in tensors}
        tensors = {**tensors, **{new: tensors[old] for new, old in names.items()}}
        if "steps" not in tensors and "buffers" in tensors:  # from before constants stayed at home
            tensors["buffers"] = self.task.flat.buffers.from_before(tensors["buffers"])
            rounds = sum("skipped" not in record for record in history)
            tensors["steps"] = torch.tensor(rounds * (self.settings.local_steps or 0))
        here = self.snapshot()
        saved = {name: check_fits(name, tensors, value) for name, value in here.items()}
        self.trainer.load_state(tensors, engine)
        for name, value in here.items():
            value.copy_(saved[name])
        self.server.round, self.history = len(history), [compact(_with_nan(r)) for r in history]
        for record in self.history:
            if self.mechanism is not None:
                self.mechanism.see(record)
            self._collapse.see(record)
            if self.best is not None:
                self.best.see(record)
            if self._stopper is not None:
                self._stopper.see(record)
        if self.best is not None and self.best.round:
            likes = {f"best.{n}": getattr(self.server, n) for n in ("weights", "buffers", "steps")}
            saved = {name: check_fits(name, tensors, like) for name, like in likes.items()}
            self._best_state = {
                name: v.to(likes[name].device, copy=True) for name, v in saved.items()
            }

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
        best = bool(self._best_state)
        self.trainer.rest()
        model = self.model(best)
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
        round = self.best.round if self.best is not None and best else None
        of_clients = self.kept, self.client_model
        return Result(weights, model, self.history, self.server, *of_clients, round, self.config)

    def _load(self, client: int | None = None, best: bool = False) -> None:
        """Put the global model, of now or the best so far, or that of a client, into the task."""
        server = self.server
        if best and self._best_state:
            weights, buffers, steps = self._best_state.values()
            server = replace(server, weights=weights, buffers=buffers, steps=steps, over_rounds={})
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


def _with_nan(record: Record) -> Record:
    """A record as the run had it: files have no NaN. Loss and accuracy on the test set are None in
    rounds without an evaluation; metrics are not there."""
    lost = {k for k in record if k.startswith("test_")} - {"test_loss", "test_accuracy"}
    lost.add("train_loss")
    return {k: math.nan if v is None and k in lost else v for k, v in record.items()}


Simulation = Run
"""The name of `Run` in earlier versions."""
