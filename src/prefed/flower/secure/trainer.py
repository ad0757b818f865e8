"""The ServerApp's part: a round whose mean comes from one sum."""

import math
from collections.abc import Callable, Iterator
from logging import INFO, WARNING

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore import log

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, RunFailed
from prefed.flower.replies import exchange
from prefed.flower.secure import messages as m
from prefed.flower.secure.fixed_point import FixedPoint
from prefed.flower.secure.masks import Vector
from prefed.flower.secure.messages import Unexpected
from prefed.flower.secure.session import Session, TooFew
from prefed.flower.secure.vector import Form, Wrong, whole_weight
from prefed.flower.server import FlowerTrainer
from prefed.flower.wire import pack, unpack
from prefed.training.admission import NotFinite, Refused, Spec, check_values, expected
from prefed.training.round import BUFFERS, Server
from prefed.training.run import Run
from prefed.training.settings import Settings
from prefed.training.trainer import Arrived, Record


def check_secure(algorithm: Algorithm, settings: Settings, client_test: float) -> None:
    """Refuse what cannot be had from sums."""
    if algorithm.client_rule().lockstep:
        raise PrefedError(
            f"secure_aggregation: {type(algorithm).__name__}'s clients meet in every local step; "
            f"it runs in simulation only"
        )
    if isinstance(settings.weighting, list):
        for weight in settings.weighting:
            whole_weight(weight)
    if client_test:
        raise PrefedError(
            "secure_aggregation: clients would send loss and accuracy on their own test samples "
            "in the clear; set data.client_test to 0"
        )


class SecureTrainer(FlowerTrainer):
    """Clients on Flower's nodes, of whose updates only the sum is seen here. A node adds up the
    updates of its own clients first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_secure(self.algorithm, self.settings, 0.0)
        self.skipped = 0
        """Rounds in a row without a sum."""

    def prepare(self, run: Run) -> None:
        check_secure(self.algorithm, self.settings, float(run.client_evaluation is not None))
        super().prepare(run)

    def train(self, server: Server, clients: list[int]) -> Arrived:
        refused: dict[int, Refused] = {}
        try:
            arrived = self._sum(server, clients, refused)
            self.skipped = 0
        except TooFew as reason:
            arrived = self._skip(server, clients, refused, str(reason))
        return arrived

    def _skip(
        self, server: Server, clients: list[int], refused: dict[int, Refused], reason: str
    ) -> Arrived:
        """The model stays as it was; too many such rounds in a row end the run."""
        self.skipped += 1
        log(WARNING, "round %d is skipped: %s", server.round + 1, reason)
        if self.skipped > self.options.retries:
            reasons = [f"client {client}: {why}" for client, why in sorted(refused.items())]
            raise RunFailed(
                f"round {server.round + 1}: {reason}. It is the round number {self.skipped} in a "
                f"row without a sum. Repair the nodes and continue with --resume\n"
                + "\n".join(reasons)
            )
        if len(refused) == len(clients) and all(
            isinstance(why, NotFinite) for why in refused.values()
        ):
            return Arrived({}, math.nan, len(clients))  # diverged
        return Arrived({}, math.nan, 0, record=_refused(refused) | {"bytes_up": 0})

    def _sum(self, server: Server, clients: list[int], refused: dict[int, Refused]) -> Arrived:
        """The four stages."""
        self.nodes.refresh(self.grid, self.options.join_seconds)
        of: dict[int, list[int]] = {}
        for client in clients:
            if self._node(client) is None:
                refused[client] = Refused("its node is not there")
            else:
                of.setdefault(self.partitions.of(client) or 0, []).append(client)
        session = Session(of, server.round, self.options.secure_neighbours)
        form, bounds = Form(self.algorithm, server), self._bounds(clients)
        exponents = form.exponents()
        fixed = form.fixed_point(exponents, bounds[0])

        def stage(name: str, take: Callable[[int, RecordDict], None]) -> None:
            for number, reply in self._replies_of(name, server, session, of, exponents, bounds):
                try:
                    if isinstance(reply, Refused):
                        raise reply
                    take(number, reply)
                except Refused as reason:
                    lost(number, reason)
                except Unexpected as reason:
                    lost(number, Refused(str(reason)))
                if name == m.UNMASK and session.is_complete:
                    break  # no reason to wait for those who are gone
            session.check(name)

        def lost(number: int, reason: Refused) -> None:
            log(WARNING, "round %d, node %d: %s", server.round + 1, number, reason)
            if number not in session.survivors:
                refused.update(dict.fromkeys(of[number], reason))

        def take_vector(number: int, reply: RecordDict) -> None:
            session.take_vector(number, read_vector(form, reply))
            for client in of[number]:
                self._see_lost(client, reply)

        stage(m.KEYS, lambda number, reply: session.take_keys(number, reply.get(m.RECORD)))
        stage(m.SHARES, lambda number, reply: session.take_shares(number, reply.get(m.RECORD)))
        stage(m.MASKED, take_vector)
        there = [client for number in sorted(session.survivors) for client in of[number]]
        needed = max(1, math.ceil(self.options.min_fraction * len(clients)))
        if len(there) < needed:
            raise TooFew(f"{len(there)} of {len(clients)} clients are there, {needed} are needed")
        stage(m.UNMASK, lambda number, reply: session.take_secrets(number, reply.get(m.RECORD)))
        arrived = self._mean(server, session, form, fixed, there)
        arrived.record.update(_refused(refused))
        return arrived

    def _bounds(self, clients: list[int]) -> tuple[int, int]:
        """The most that all weights add up to, and the largest of one client."""
        if self.own_data and self.settings.weighting == "samples":
            return len(clients) * self.options.largest_count, self.options.largest_count
        weights = [self._weight(client) for client in clients]
        return sum(weights), max(weights)

    def _weight(self, client: int) -> int:
        samples = 1 if self.own_data else len(self.data.client(client))
        return whole_weight(self.settings.weight(client, samples))

    def _replies_of(
        self,
        name: str,
        server: Server,
        session: Session,
        of: dict[int, list[int]],
        exponents: list[int],
        bounds: tuple[int, int],
    ) -> Iterator[tuple[int, RecordDict | Refused]]:
        """A stage's message to each node that is still there, and what comes back."""
        training = name == m.MASKED
        seconds = self.options.round_seconds
        broadcast = pack(server.broadcast(self.algorithm)) if training else None
        numbers, messages = dict[int, int](), list[Message]()
        for number in session.asked(name):
            node = self.nodes.nodes[number]
            record = session.ask(name, number)
            numbers[node] = number
            if broadcast is None:
                kind = f"{MessageType.QUERY}.{name}"
                content = RecordDict({m.RECORD: record})
                group = str(server.round + 1)
                messages.append(Message(content, node, kind, ttl=seconds, group_id=group))
                continue
            record[m.EXPONENTS], (record[m.TOTAL], record[m.LARGEST]) = exponents, bounds
            kind = f"{MessageType.TRAIN}.{name}"
            message = self._message(server, node, of[number], broadcast, kind, seconds)
            message.content[m.RECORD] = record
            session.common = session.common or m.common(message.content)
            messages.append(message)
        for message, reply in exchange(self.grid, messages, seconds):
            number = numbers[message.metadata.dst_node_id]
            yield number, reply if isinstance(reply, Refused) else reply.content
            if not isinstance(reply, Refused):
                reply.content.clear()

    def _mean(
        self, server: Server, session: Session, form: Form, fixed: FixedPoint, there: list[int]
    ) -> Arrived:
        bounds = self._bounds(there)[0]
        known = not (self.own_data and self.settings.weighting == "samples")
        total = session.unmask().view(np.int64)
        try:
            if known and int(total[0]) != bounds:
                raise Wrong("weights that do not add up")
            values, loss, clipped = form.decode(fixed, total, bounds)
            specs = {n: s for n, s in expected(self.algorithm, server).items() if n in values}
            check_values(specs, {name: values[name] for name in specs})
        except (Wrong, Refused) as reason:
            raise TooFew(
                f"the sum is refused: {reason}. A node has sent a wrong vector or wrong shares, "
                f"and nobody can see which"
            ) from None
        if clipped:
            log(WARNING, "round %d: %d numbers were beyond their bounds and cut off",
                server.round + 1, clipped)  # fmt: skip
        self.admitted = sorted(there)
        values = {name: value.to(self.task.device) for name, value in values.items()}
        record = self._traffic(form, session) | {"clipped": clipped}
        log(INFO, "round %d: the sum of %d of %d nodes", server.round + 1,
            len(session.survivors), len(session.around))  # fmt: skip
        return Arrived(values, loss, len(there), record=record)

    def _traffic(self, form: Form, session: Session) -> Record:
        """Vectors as they were sent: one from each node in the sum."""
        count, names = len(session.survivors), form.values.keys()
        weights = form.bytes_of({"weights": 0, BUFFERS: 0})
        fields = names - {"weights", BUFFERS, "loss", "local_steps"}
        return {
            "bytes_up": count * 8 * form.length,
            "bytes_up_weights": count * weights,
            "bytes_up_state": count * form.bytes_of(dict.fromkeys(fields)),
            "bytes_keys": session.key_bytes,
        }


def read_vector(form: Form, content: RecordDict) -> Vector:
    """The masked vector in a node's reply."""
    record = content.get(m.RECORD)
    if isinstance(record, ConfigRecord) and record.get(m.NOT_FINITE) is True:
        raise NotFinite("its update is not finite")
    spec = Spec((form.length,), torch.int64)
    vector = unpack(content.get(m.VECTOR), {m.VECTOR: spec})[m.VECTOR]
    return vector.numpy().view(np.uint64)


def _refused(refused: dict[int, Refused]) -> Record:
    return {"refused": {str(c): str(r) for c, r in sorted(refused.items())}} if refused else {}
