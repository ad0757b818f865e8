"""The ServerApp's part: rounds whose mean comes from one sum."""

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from logging import INFO, WARNING

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore import log

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, RunFailed
from prefed.flower.replies import exchange
from prefed.flower.secure import stages as m
from prefed.flower.secure.masks import Vector
from prefed.flower.secure.session import Session, TooFew
from prefed.flower.secure.stages import Unexpected
from prefed.flower.secure.vector import Form, Wrong, whole_weight
from prefed.flower.server import FlowerTrainer
from prefed.flower.wire import pack, unpack
from prefed.training.admission import NotFinite, Refused, Spec, check_values, expected
from prefed.training.run import Run
from prefed.training.server_state import BUFFERS, LOCAL_STEPS, Server
from prefed.training.settings import Settings
from prefed.training.trainer import Arrived, Record


def check_secure(algorithm: Algorithm, settings: Settings, client_test: bool) -> None:
    """Refuse what cannot be had from sums."""
    if algorithm.client_rule().lockstep:
        raise PrefedError(
            f"secure_aggregation: {type(algorithm).__name__}'s clients meet in every local step; "
            f"it runs in simulation only"
        )
    if settings.mean != "plain" or settings.state_mean not in (None, "plain"):
        raise PrefedError(
            "secure_aggregation: a robust mean looks at single updates, which the server does not "
            "see; leave mean and state_mean out"
        )
    if settings.privacy is not None:
        raise PrefedError(
            "secure_aggregation: the mechanism of privacy clips each update on the server, which "
            "does not see it; leave one of them out"
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
        check_secure(self.algorithm, self.settings, client_test=False)
        self.skipped = 0
        """Rounds in a row without a sum."""

    def prepare(self, run: Run) -> None:
        check_secure(self.algorithm, self.settings, run.client_evaluation is not None)
        super().prepare(run)

    def train(self, server: Server, clients: list[int]) -> Arrived:
        if self.skipped:
            self._wait(clients)
        else:
            self.nodes.refresh(self.grid, self.options.join_seconds)
        attempt = Attempt(self, server, clients)
        try:
            arrived = attempt.run()
        except TooFew as reason:
            return self._skip(attempt, str(reason))
        self.skipped, self.admitted = 0, attempt.in_sum
        return arrived

    def _skip(self, attempt: "Attempt", reason: str) -> Arrived:
        """The model stays as it was; too many such rounds in a row end the run."""
        self.skipped += 1
        round, refused = attempt.server.round + 1, attempt.refused
        log(WARNING, "round %d is skipped: %s", round, reason)
        if len(refused) == len(attempt.clients) and all(
            isinstance(why, NotFinite) for why in refused.values()
        ):
            return Arrived({}, math.nan, len(refused))  # everybody has diverged
        if self.skipped > self.options.retries:
            reasons = [f"client {client}: {why}" for client, why in sorted(refused.items())]
            raise RunFailed(
                f"round {round}: {reason}; the model stays as it was. Rounds without a sum: "
                f"{self.skipped} in a row. Repair the nodes and continue with --resume\n"
                + "\n".join(reasons)
            )
        return Arrived({}, math.nan, 0, record=attempt.record())


class Attempt:
    """One try at the sum of one round."""

    def __init__(self, trainer: SecureTrainer, server: Server, clients: list[int]) -> None:
        self.trainer, self.server, self.clients = trainer, server, clients
        self.options, self.settings = trainer.options, trainer.settings
        self.refused: dict[int, Refused] = {}
        """The clients that are not in the sum, and why."""
        self.of: dict[int, list[int]] = {}
        """The clients of each node that is there."""
        for client in clients:
            number = trainer.partitions.of(client)
            if number is None or number not in trainer.nodes.nodes:
                self.refused[client] = Refused("its node is not there")
            else:
                self.of.setdefault(number, []).append(client)
        self.form = Form(trainer.algorithm, server)
        self.session: Session | None = None

    def run(self) -> Arrived:
        """The four stages, and the mean."""
        session = Session(self.of, self.server.round, self.options.secure_neighbours)
        self.session, self.exponents = session, self.form.exponents()
        total, _ = self.bounds(self.clients)
        fixed = self.form.fixed_point(self.exponents, total)
        self._stage(m.KEYS, partial(_take, session.take_keys))
        self._stage(m.SHARES, partial(_take, session.take_shares))
        self._stage(m.MASKED, self._take_vector)
        there, asked = len(self.in_sum), len(self.clients)
        needed = max(1, math.ceil(self.options.min_fraction * asked))
        if there < needed:
            raise TooFew(f"{there} of {asked} clients are there, {needed} are needed")
        self._stage(m.UNMASK, partial(_take, session.take_secrets))
        sums, weights = session.unmask().view(np.int64), self.bounds(self.in_sum)[0]
        try:
            if self.knows_weights and int(sums[0]) != weights:
                raise Wrong("weights that do not add up")
            values, loss, clipped = self.form.decode(fixed, sums, weights)
            specs = expected(self.trainer.algorithm, self.server)
            specs = {name: spec for name, spec in specs.items() if name in values}
            check_values(specs, {name: values[name] for name in specs})
        except (Wrong, Refused) as reason:
            raise TooFew(
                f"the sum is refused: {reason}. A node has sent a wrong vector or wrong shares, "
                f"and nobody can see which"
            ) from None
        round = self.server.round + 1
        log(INFO, "round %d: the sum of %d of %d nodes",
            round, len(session.survivors), len(session.around))  # fmt: skip
        if clipped:
            log(WARNING, "round %d: %d numbers were beyond their bounds and cut off",
                round, clipped)  # fmt: skip
        values = {name: value.to(self.trainer.task.device) for name, value in values.items()}
        return Arrived(values, loss, there, record=self.record() | {"clipped": clipped})

    @property
    def in_sum(self) -> list[int]:
        """The clients whose updates are in it."""
        numbers = self.session.survivors if self.session else ()
        return sorted(client for number in numbers for client in self.of[number])

    @property
    def knows_weights(self) -> bool:
        return not (self.trainer.own_data and self.settings.weighting == "samples")

    def bounds(self, clients: list[int]) -> tuple[int, int]:
        """The most that these clients' weights add up to, and the largest of one."""
        if not self.knows_weights:
            return len(clients) * self.options.largest_count, self.options.largest_count
        data = self.trainer.data
        counts = {c: 1 if self.trainer.own_data else len(data.client(c)) for c in clients}
        weights = [whole_weight(self.settings.weight(c, n)) for c, n in counts.items()]
        return sum(weights), max(weights)

    def _stage(self, stage: str, take: Callable[[int, RecordDict], None]) -> None:
        """Ask the nodes that are left, take what they answer, and see whether it is enough."""
        assert self.session is not None
        for number, reply in self._replies(stage, self.session):
            try:
                if isinstance(reply, Refused):
                    raise reply
                take(number, reply)
            except (Refused, Unexpected) as error:
                reason = error if isinstance(error, Refused) else Refused(str(error))
                log(WARNING, "round %d, node %d: %s", self.server.round + 1, number, reason)
                if number not in self.session.survivors:
                    self.refused |= dict.fromkeys(self.of[number], reason)
            if stage == m.UNMASK and self.session.is_complete:
                break  # no reason to wait for those who are gone
        self.session.check(stage)

    def _replies(self, stage: str, session: Session) -> Iterator[tuple[int, RecordDict | Refused]]:
        """What comes back from each node, valid until the next is asked for."""
        nodes = {self.trainer.nodes.nodes[number]: number for number in session.asked(stage)}
        make = self._training if stage == m.MASKED else self._query
        messages = [make(stage, session, number, node) for node, number in nodes.items()]
        for message, reply in exchange(self.trainer.grid, messages, self.options.round_seconds):
            number = nodes[message.metadata.dst_node_id]
            yield number, reply if isinstance(reply, Refused) else reply.content
            if not isinstance(reply, Refused):
                reply.content.clear()  # Flower's records hold on to each other

    @cached_property
    def _broadcast(self) -> ArrayRecord:
        return pack(self.server.broadcast(self.trainer.algorithm))

    def _query(self, stage: str, session: Session, number: int, node: int) -> Message:
        content = RecordDict({m.RECORD: session.ask(stage, number)})
        kind, group = f"{MessageType.QUERY}.{stage}", str(self.server.round + 1)
        return Message(content, node, kind, ttl=self.options.round_seconds, group_id=group)

    def _training(self, stage: str, session: Session, number: int, node: int) -> Message:
        record = session.ask(stage, number)
        record[m.EXPONENTS] = self.exponents
        record[m.TOTAL], record[m.LARGEST] = self.bounds(self.clients)
        message = self.trainer._message(
            self.server, node, self.of[number], self._broadcast, f"{MessageType.TRAIN}.{stage}",
            self.options.round_seconds,
        )  # fmt: skip
        message.content[m.RECORD] = record
        session.common = session.common or m.common(message.content)
        return message

    def _take_vector(self, number: int, reply: RecordDict) -> None:
        assert self.session is not None
        self.session.take_vector(number, read_vector(self.form, reply))
        for client in self.of[number]:
            self.trainer._see_lost(client, reply)

    def record(self) -> Record:
        """The bytes of vectors, one from each node in the sum, and of the keys and shares, both
        ways; and who is not in it."""
        count = len(self.session.survivors) if self.session else 0
        weights = {"weights", BUFFERS}
        state = self.form.values.keys() - weights - {"loss", LOCAL_STEPS}
        found: Record = {
            "bytes_up": count * 8 * self.form.length,
            "bytes_up_weights": count * self.form.bytes_of(weights),
            "bytes_up_state": count * self.form.bytes_of(state),
            "bytes_keys": self.session.key_bytes if self.session else 0,
        }
        if self.refused:
            found["refused"] = {str(c): str(r) for c, r in sorted(self.refused.items())}
        return found


def _take(take: Callable[[int, object], None], number: int, reply: RecordDict) -> None:
    take(number, reply.get(m.RECORD))


def read_vector(form: Form, content: RecordDict) -> Vector:
    """The masked vector in a node's reply."""
    record = content.get(m.RECORD)
    if isinstance(record, ConfigRecord) and record.get(m.NOT_FINITE) is True:
        raise NotFinite("its update is not finite")
    spec = Spec((form.length,), torch.int64)
    vector = unpack(content.get(m.VECTOR), {m.VECTOR: spec})[m.VECTOR]
    return vector.numpy().view(np.uint64)
