"""The loopback grid with replies that are changed, lost or out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message

from prefed.flower import loopback
from prefed.flower.loopback import Nodes

Tamper = Callable[[int, Message, Message], Message | None]
"""(node, message, reply) -> the reply as it arrives, or None if it never does."""


class LoopbackGrid(loopback.LoopbackGrid):
    """backwards: the last one asked answers first."""

    def __init__(
        self,
        nodes: Nodes,
        tamper: Tamper = lambda node, message, reply: reply,
        backwards: bool = False,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(nodes, run_config)
        self.tamper, self.backwards = tamper, backwards
        self.most_pulled = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        if self.backwards and (left := list(self.waiting)) and wanted != left[-1:]:
            return []
        replies = list(super().pull_messages(wanted))
        self.most_pulled = max(self.most_pulled, len(replies))
        return replies

    def arrive(self, node: int, message: Message, reply: Message) -> Message | None:
        return self.tamper(node, message, reply)
