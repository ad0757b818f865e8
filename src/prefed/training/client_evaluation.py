"""The model on the clients' own test samples: for each client, not only for all of them together.

Clients that have the server's weights are evaluated many at a time: one forward pass over the
samples of all, and sums over the segments that belong to each. Clients with weights of their own,
such as those that make a few local steps first (FedAvg + fine-tuning), take turns; with the
sequential engine all do, as on machines of their own.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from prefed.core import batch, draws
from prefed.core.batch import Inputs
from prefed.core.errors import PrefedError
from prefed.core.losses import (
    WITH_CLASSES,
    are_labels,
    count_correct,
    ignored_label,
    options_of_cross_entropy,
)
from prefed.core.parts import timed
from prefed.data.samples import Samples
from prefed.training.block_state import client_state, kept_by
from prefed.training.engines.auto import Choice
from prefed.training.engines.engine import Engine
from prefed.training.engines.workers import Workers
from prefed.training.round import Update
from prefed.training.server_state import BUFFERS, PERSONAL, Server
from prefed.training.task import Task
from prefed.training.trainer import Record

if TYPE_CHECKING:
    from prefed.training.run import Run

log = logging.getLogger("prefed")

Weights = tuple[Tensor, Tensor]
"""All weights and the statistics of a client."""
Score = tuple[float, float | None]
"""Loss, and accuracy if the targets are labels."""


class ClientEvaluation:
    """How a run evaluates its clients."""

    def __init__(self, run: "Run") -> None:
        self.run, self.settings = run, run.settings
        self.every = run.settings.evaluate_clients_every or run.settings.evaluate_every
        loss = run.task.loss
        ignores = options_of_cross_entropy(loss) is not None and ignored_label(loss) is not None
        _, y = run.data.client(0).take(torch.arange(1))
        self.may_ignore = ignores and are_labels(y)
        """There may be clients of whose targets none counts."""
        self.labelled = self.may_ignore
        """Clients have an accuracy; `try_out` finds out."""
        self._tuning: Workers | None = None
        if run.settings.finetune_steps and run.algorithm.client_rule().lockstep:
            raise PrefedError(
                "finetune_steps: clients of this algorithm step together, none by itself; leave "
                "it out, or take another algorithm"
            )

    @classmethod
    def of(cls, run: "Run") -> "ClientEvaluation | None":
        """How a run evaluates its clients; None if they have nothing to be evaluated on."""
        if run.data.client_tests is None:
            for name in ("evaluate_clients", "evaluate_clients_every", "finetune_steps"):
                if getattr(run.settings, name) is not None:
                    raise PrefedError(
                        f"{name}: clients have no test samples of their own; set data.client_test, "
                        f"or in Python use data.hold_out(0.2) or FederatedData(..., client_tests=)"
                    )
            if run.server.personal.numel() and run.data.test is not None and run.trainer.leads:
                log.warning(
                    "the test set is evaluated with the global model, whose personal parts nobody "
                    "trains; set data.client_test = 0.2 (in Python data.hold_out(0.2)) to evaluate "
                    "each client with its own"
                )
            return None
        if (run.settings.evaluate_clients or 0) > len(run.data):
            raise PrefedError(
                f"evaluate_clients: {run.settings.evaluate_clients} is more than the "
                f"{len(run.data)} clients there are"
            )
        return cls(run)

    def choose(self) -> list[int]:
        """The clients of an evaluation: all, or a sample that depends on seed and round alone;
        without those that have no test samples."""
        run = self.run
        size = self.settings.evaluate_clients
        chosen = draws.cohort(
            self.settings.seed, run.server.round, len(run.data), size, "evaluated clients"
        )
        return [client for client in chosen if run.data.test_size(client)]

    def try_out(self) -> Record:
        """One client, before the first round and without local steps: what records will have."""
        data = self.run.data
        some = next((c for c in range(len(data)) if data.test_size(c)), None)
        if some is None:
            raise PrefedError("client_tests: no client has test samples")
        scores = dict(self.here([some], tuned=False))
        self.labelled |= scores[some][1] is not None
        return self._record([some], scores)

    @timed("evaluation")
    def evaluate(self) -> Record:
        clients = self.choose()
        scores = self.run.trainer.scores(self, clients)
        return self._record([client for client in clients if client in scores], scores)

    def _record(self, clients: list[int], scores: Mapping[int, Score]) -> Record:
        record: Record = {}
        if self.may_ignore:
            clients = [c for c in clients if scores[c][1] is not None]
        for name, lists, column, worst in (
            ("accuracy", "accuracies", [scores[c][1] for c in clients], 1),
            ("loss", "losses", [scores[c][0] for c in clients], -1),
        ):
            values = [value for value in column if value is not None]
            if values:
                record |= {f"client_{name}_{k}": v for k, v in spread(values, worst).items()}
                record[f"client_{lists}"] = values
        if len(clients) < len(self.run.data):
            record["evaluated_clients"] = clients
        return record

    def shown(self, server: Server) -> Server:
        """What clients need to know of it: the model, and what they share only for steps."""
        weights, buffers = server.model()
        shared = server.shared if self.settings.finetune_steps else {}
        return replace(server, weights=weights, buffers=buffers, shared=shared, over_rounds={})

    def here(self, clients: list[int], tuned: bool = True) -> Iterator[tuple[int, Score]]:
        """The scores of clients whose samples, and whatever they keep, are in this process."""
        run, alike = self.run, []
        for client, weights in self._weights(clients, tuned):
            if weights is None:
                alike.append(client)
            else:
                run.task.flat.load(*weights, run.server.steps)
                yield client, score(run.task, [run.data.client_test(client)])[0]
        run.task.flat.load(*client_state(run.server, {}), run.server.steps)
        samples = [run.data.client_test(client) for client in alike]
        together = self.settings.engine != "sequential"
        yield from zip(alike, score(run.task, samples, together), strict=True)

    def _weights(self, clients: list[int], tuned: bool) -> Iterator[tuple[int, Weights | None]]:
        """What each client is evaluated with, valid until the next is asked for; None if that is
        the global model."""
        run = self.run
        if not (tuned and self.settings.finetune_steps):
            own = {PERSONAL, BUFFERS} & getattr(run.trainer, "first_kept", {}).keys()
            for client in clients:
                differs = own and client in run.kept
                yield client, run.trainer.client_state(run.server, client) if differs else None
            return
        before = run.server.round - 1  # the round that has just been
        server = replace(self.shown(run.server), round=before)

        def train(engine: Engine, block: Sequence[int]) -> Update:
            return engine.update(run.algorithm, server, block, kept_by(run.kept, block))

        workers = self._workers()
        with torch.random.fork_rng(enabled=True):
            for first, update in workers.updates(train, workers.blocks(run.algorithm, clients)):
                for row, change in enumerate(update.values["weights"]):
                    after = replace(server, weights=server.weights + change)
                    if BUFFERS in update.values:
                        after.buffers = update.values[BUFFERS][row]
                    kept = {name: value[row] for name, value in update.kept.items()}
                    yield clients[first + row], client_state(after, kept)

    def _workers(self) -> Workers:
        """Engines for fine-tuning, with a model and draws of their own: the run does not notice."""
        if self._tuning is None:
            run, trainer = self.run, self.run.trainer
            steps = self.settings.finetune_steps
            assert steps is not None
            seed = draws.torch_seed(self.settings.seed, "fine-tuning")
            settings = self.settings.with_steps(steps).model_copy(update={"seed": seed})
            task = run.task.copy(run.data)
            choice = getattr(trainer, "choice", None) or Choice("sequential", 1)
            count = min(choice.workers, len(run.data))  # more would have nothing to do
            self._tuning = Workers(choice.engine, count, task, run.data, settings)
        return self._tuning


def spread(values: Sequence[float], worst: int) -> dict[str, float]:
    """The mean over clients, the standard deviation, and the mean of the tenth that fares worst:
    the lowest values if `worst` is 1, the highest if it is -1."""
    mean = sum(values) / len(values)
    tenth = sorted(values, key=lambda value: worst * value)[: math.ceil(len(values) / 10)]
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return {"mean": mean, "std": deviation, "worst_tenth": sum(tenth) / len(tenth)}


@torch.no_grad()
def score(task: Task, clients: Sequence[Samples], together: bool = True) -> list[Score]:
    """The weights that are loaded, on each of these clients' samples."""
    training = task.flat.module.training
    task.flat.module.eval()
    found: list[Score] = []
    if any(samples.is_ragged for samples in clients[:1]):
        together = False  # each is padded to its own longest
    most = task.evaluation_batch if together else 0
    for group in _groups([len(samples) for samples in clients], most):
        if len(group) == 1:
            found.append(task.evaluate(*clients[group.start].all()))
        else:
            found += _together(task, clients[group.start : group.stop])
    task.flat.module.train(training)
    return found


def _groups(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours with so many samples at most together; a client that has more, alone."""
    first, held = 0, 0
    for client, size in enumerate(sizes):
        if held and held + size > most:
            yield range(first, client)
            first, held = client, 0
        held += size
    if sizes:
        yield range(first, len(sizes))


def _together(task: Task, clients: Sequence[Samples]) -> list[Score]:
    """One forward pass over the samples of all."""
    x, y = joined(clients)
    output, y = task.forward(x), y.to(task.device)
    sizes = [len(samples) for samples in clients]
    owner = torch.arange(len(sizes), device=y.device).repeat_interleave(
        torch.tensor(sizes, device=y.device)
    )

    def sums(each: Tensor) -> Tensor:
        """Of what each sample has, by client."""
        zeros = torch.zeros(len(sizes), dtype=torch.float64, device=y.device)
        return zeros.index_add(0, owner, each.reshape(len(y), -1).double().sum(1))

    if are_labels(y) and task.loss in WITH_CLASSES:
        counted = sums(y >= 0)
        right = sums((output.argmax(1) == y) & (y >= 0)) / counted
        losses = sums(functional.cross_entropy(output, y, reduction="none")) / counted
        shares = [None if math.isnan(share) else share for share in right.tolist()]
        return list(zip(losses.tolist(), shares, strict=True))
    found: list[Score] = []
    for part in zip(output.split(sizes), y.split(sizes), strict=True):
        correct, of = count_correct(task.loss, *part) or (0, 0)
        found.append((float(task.loss(*part)), correct / of if of else None))
    return found


def joined(clients: Sequence[Samples]) -> tuple[Inputs, Tensor]:
    """The samples of several clients, one after another; in one go if they share a data set."""
    whole = clients[0]
    if all(s.is_of(whole) and s.index is not None for s in clients):
        index = torch.cat([s.index for s in clients if s.index is not None])
        return whole.part(index).all()
    xs, ys = zip(*(samples.all() for samples in clients), strict=True)
    return batch.joined(xs), torch.cat(ys)
