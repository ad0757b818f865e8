"""A Flower federation in this process: real ClientApps and Flower's own serialisation, without
other processes, Ray or a network. For notebooks, and for tests of an app of one's own."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from prefed.flower import protocol as p

RUN = 7
FIRST_NODE = 101

Nodes = dict[int, tuple[ClientApp, dict[str, Any]]]


class LoopbackGrid(Grid):
    """The grid for a strategy's `start`. A client trains when its reply is asked for.

    nodes        node id -> (ClientApp, node config)
    run_config   what ClientApps find in context.run_config
    """

    def __init__(self, nodes: Nodes, run_config: dict[str, Any] | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
        self.nodes, self.run_config = nodes, run_config or {}
        self.waiting: dict[str, Message] = {}
        self.sent = 0
        self._states: dict[int, RecordDict] = {}

    @classmethod
    def of(
        cls, app: ClientApp, nodes: int, run_config: dict[str, Any] | None = None
    ) -> "LoopbackGrid":
        """So many nodes with one ClientApp, each with a partition-id of its own."""
        places = [{p.PARTITION: n, p.PARTITIONS: nodes} for n in range(nodes)]
        return cls({FIRST_NODE + n: (app, place) for n, place in enumerate(places)}, run_config)

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"{message.object_id}-{self.sent}"
            numbers.append(message.metadata.message_id)
            self.waiting[message.metadata.message_id] = message
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = [number for number in message_ids if number in self.waiting]
        return [reply for number in asked if (reply := self._answer(number)) is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def arrive(self, node: int, message: Message, reply: Message) -> Message | None:
        """The reply as it arrives at the server, or None if it never does."""
        return reply

    def _answer(self, number: str) -> Message | None:
        message = self.waiting.pop(number)
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return None
        app, config = self.nodes[node]
        state = self._states.setdefault(node, RecordDict())
        context = Context(RUN, node, config, state, self.run_config)
        arrived = through_the_wire(message)
        try:
            reply = app(arrived, context)
        except Exception as error:  # as flwr-clientapp does it
            reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=arrived)
        self._states[node] = context.state
        reply.metadata.__dict__["_message_id"] = "reply"
        sent = self.arrive(node, message, reply)
        back = None if sent is None else through_the_wire(sent)
        for made in (arrived, reply):  # as when the client's process ends
            if made.has_content():
                made.content.clear()
        return back


def through_the_wire(message: Message) -> Message:
    """What arrives when a message is taken apart and put together as Flower does it."""
    number = message.metadata.message_id
    contents = {i: o.deflate() for i, o in get_all_nested_objects(message).items()}
    arrived: Message = inflate_object_from_contents(message.object_id, contents)  # type: ignore[assignment]
    arrived.metadata.__dict__["_message_id"] = number
    return arrived
