"""A Grid in one process: real ClientApps and Flower's real serialisation, without the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[int, Message, Message], Message | None]
"""(node, message, reply) -> the reply as it arrives, or None if it never does."""

RUN = 7


def through_the_wire(message: Message) -> Message:
    """What arrives when a message is taken apart and put together as Flower does it."""
    number = message.metadata.message_id
    contents = {i: o.deflate() for i, o in get_all_nested_objects(message).items()}
    arrived: Message = inflate_object_from_contents(message.object_id, contents)  # type: ignore[assignment]
    arrived.metadata.__dict__["_message_id"] = number
    return arrived


class LoopbackGrid(Grid):
    """nodes: node id -> (ClientApp, node config). backwards: the last one asked answers first."""

    def __init__(
        self,
        nodes: dict[int, tuple[ClientApp, dict[str, Any]]],
        tamper: Tamper = lambda node, message, reply: reply,
        backwards: bool = False,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        self.run_config = run_config or {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
        self.nodes, self.tamper, self.backwards = nodes, tamper, backwards
        self.waiting: dict[str, Message] = {}
        self.sent = 0
        self.most_pulled = 0

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
        wanted = list(message_ids)
        if self.backwards and (left := list(self.waiting)) and wanted != left[-1:]:
            return []  # the last one asked answers first
        replies = [r for i in wanted if i in self.waiting if (r := self._answer(i)) is not None]
        self.most_pulled = max(self.most_pulled, len(replies))
        return replies

    def _answer(self, number: str) -> Message | None:
        message = self.waiting.pop(number)
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return None
        app, config = self.nodes[node]
        context = Context(RUN, node, config, RecordDict(), self.run_config)
        arrived = through_the_wire(message)
        try:
            reply = app(arrived, context)
        except Exception as error:  # as flwr-clientapp does it
            reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=arrived)
        reply.metadata.__dict__["_message_id"] = "reply"
        tampered = self.tamper(node, message, reply)
        back = None if tampered is None else through_the_wire(tampered)
        for made in (arrived, reply):  # as when the client's process ends
            if made.has_content():
                made.content.clear()
        return back

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
