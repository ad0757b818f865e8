"""The clients of a deployed config that live on one node, for the time of one message."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context, MetricRecord, RecordDict

from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data import FederatedData
from prefed.experiments.config import load
from prefed.flower import protocol as p
from prefed.flower.client import OwnData, place
from prefed.flower.kept_state import KeptState, state_directory
from prefed.flower.wire import pack_message, unpack
from prefed.rules import State
from prefed.training.admission import Spec, broadcast
from prefed.training.block_state import first_kept
from prefed.training.engines.sequential import Sequential
from prefed.training.messages import Message as PackedMessage
from prefed.training.messages import receive, to_mean, upload
from prefed.training.server_state import Server

if TYPE_CHECKING:
    from prefed.flower.secure.fixed_point import Integers


@dataclass(frozen=True)
class Trained:
    """What local steps have made of one client."""

    message: PackedMessage
    samples: int
    loss: float
    about: dict[str, Any]


class Host:
    def __init__(self, text: str, own: OwnData | None, asked: RecordDict, context: Context) -> None:
        self.ask, self.asked = p.Ask.read(asked.get(p.ASK)), asked
        if self.ask.config != p.fingerprint(text):
            raise PrefedError("the server runs another config than this node's app holds")
        self.place = place(context)
        config = load(tomllib.loads(text))
        self.run = config.make_run()
        if own is not None:
            if config.attackers is not None:
                raise PrefedError(
                    "attackers: they are for trials with the data of the config, and this node has "
                    "samples of its own"
                )
            share = config.data.client_test
            data = _own_data(self.run.data, own(context))
            self.run.data = data.hold_out(share, config.seed) if share else data
        self.keeps = first_kept(self.run.algorithm, self.run.task.flat)
        self.store = KeptState(state_directory(dict(context.node_config)), self.ask.run)

    def train(self) -> RecordDict:
        reply = RecordDict()
        for client, trained in self._trained(self._server(self.run.server)):
            about = {p.SAMPLES: trained.samples, p.LOSS: trained.loss}
            reply[p.update_key(client)] = pack_message(trained.message)
            reply[p.about_key(client)] = MetricRecord(trained.about | about)
        return reply

    def train_for_sum(
        self, exponents: list[int], total_weight: int, largest_weight: int
    ) -> "tuple[Integers, dict[str, MetricRecord]] | None":
        """The sum of what the clients here would send, as secure aggregation adds it up, and what
        may be known of each; None if an update is not finite."""
        from prefed.flower.secure.vector import Form, whole_weight

        run, server = self.run, self._server(self.run.server)
        form = Form(run.algorithm, server)
        fixed = form.fixed_point(exponents, total_weight)
        total, abouts = None, {}
        for client, trained in self._trained(server):
            weight = whole_weight(run.settings.weight(client, trained.samples))
            if weight > largest_weight:
                raise PrefedError(  # which goes to the server: it may not say how many
                    f"client {client} has more samples than largest-count = {largest_weight}; set "
                    f"it higher in the run config"
                )
            received = receive(run.algorithm, server, trained.message)
            steps = torch.tensor([run.settings.steps(trained.samples)], dtype=torch.float64)
            values = to_mean(run.algorithm, {n: v[0] for n, v in received.items()}, steps)
            vector = form.encode(fixed, values, trained.loss, weight)
            if vector is None:
                return None
            total = vector if total is None else total + vector
            abouts[p.about_key(client)] = MetricRecord(trained.about)
        if total is None:
            raise PrefedError("the server asks for none of the clients here")
        return total, abouts

    def _trained(self, server: Server) -> Iterator[tuple[int, Trained]]:
        """Each client that is asked for, after its local steps; what it keeps is written."""
        run, algorithm = self.run, self.run.algorithm
        engine = Sequential(run.task, run.data, run.settings)
        for client, kept, about in self._clients():
            update = engine.update(algorithm, server, [client], kept)
            if run.attackers is not None:
                update = run.attackers.send(algorithm, server, update, [client])
            if run.mechanism is not None:  # if this client trusts nobody, the noise is its own
                run.mechanism.secret = True
                update = run.mechanism.on_clients(server, update, [client])
            message, stays = upload(algorithm, server, update, [client], kept, run.settings.seed)
            if self.keeps:
                self.store.write(client, self.ask.round, {n: v[0] for n, v in stays.items()})
            samples, loss = len(run.data.client(client)), float(update.losses[0])
            yield client, Trained(message, samples, loss, about)

    def evaluate(self) -> RecordDict:
        run, reply, evaluation = self.run, RecordDict(), self.run.client_evaluation
        if evaluation is None:
            raise PrefedError("clients have no test samples of their own; set data.client_test")
        run.server = self._server(evaluation.shown(run.server))
        for client, kept, about in self._clients():
            run.kept.put(self.ask.round, kept)
            about[p.SAMPLES] = len(run.data.client_test(client))
            for _, (loss, accuracy) in evaluation.here([client] if about[p.SAMPLES] else []):
                if accuracy is not None or not evaluation.may_ignore:
                    about[p.EVALUATION_LOSS] = loss
                if accuracy is not None:
                    about[p.ACCURACY] = accuracy
            reply[p.about_key(client)] = MetricRecord(about)
        return reply

    def _server(self, first: Server) -> Server:
        """The server as the message shows it; what it does not show is as in the beginning."""
        device = self.run.task.device
        state = unpack(self.asked[p.SERVER], broadcast(self.run.algorithm, first))
        state = {name: value.to(device) for name, value in state.items()}
        weights, buffers = state.pop("weights"), state.pop("buffers", first.buffers)
        steps = torch.tensor(self.ask.steps, device=device)
        return Server(
            self.ask.round, weights, buffers, {}, state, first.layout, steps, first.personal
        )

    def _clients(self) -> Iterator[tuple[int, dict[int, State], dict[str, Any]]]:
        """Each client that is asked for, what it has kept, and what its reply begins with."""
        partition, partitions = self.place
        device = self.run.task.device
        specs = {n: Spec(tuple(v.shape), v.dtype) for n, v in self.keeps.items()}
        for client, last in zip(self.ask.clients, self.ask.after, strict=True):
            if p.hosted(client, partitions) != partition:
                raise PrefedError(f"client {client} does not live on partition {partition}")
            began = self.store.read(client, last, specs) if self.keeps else None
            kept = {} if began is None else {client: {n: v.to(device) for n, v in began.items()}}
            after = last if began is not None else -1
            yield client, kept, {p.CLIENT: client, p.ROUND: self.ask.round, p.AFTER: after}


def _own_data(data: FederatedData, samples: Any) -> FederatedData:
    """The config's data with this node's samples in place of every client's."""

    class Own:
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, client: int) -> Any:
            return samples

    made = FederatedData(Own(), data.test, data.transform, data.augment, pad=data.pad)
    found, wanted = made.client(0).y, data.client(0).y
    if are_labels(found) != are_labels(wanted):
        raise PrefedError(f"y of this node is {found.dtype}, that of the config {wanted.dtype}")
    return made
