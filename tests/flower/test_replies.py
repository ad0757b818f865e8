"""Replies are asked for often, and never so often that a SuperLink has time for nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from prefed.flower import replies
from prefed.flower.loopback import LoopbackGrid
from prefed.training.admission import Refused


class SlowGrid(LoopbackGrid):
    """Nobody has trained before a certain time, and every question takes a while: on a clock of
    its own."""

    def __init__(self, nodes: int, question: float, done: float) -> None:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: object) -> Message:
            return Message(RecordDict(), reply_to=message)

        super().__init__(LoopbackGrid.of(app, nodes).nodes)
        self.question, self.done = question, done
        self.now = self.asking = 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.now += self.question
        if self.now < self.done:
            self.asking += self.question
            return []
        return super().pull_messages(message_ids)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("nodes", "question"), [(4, 0.005), (100, 0.005), (500, 0.001)])
def test_most_of_the_time_the_superlink_is_left_alone(
    nodes: int, question: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = SlowGrid(nodes, question, done=60.0)
    monkeypatch.setattr(replies, "time", grid)
    asked = [Message(RecordDict(), node, MessageType.TRAIN) for node in grid.get_node_ids()]
    found = list(replies.exchange(grid, asked, 120.0))
    assert len(found) == nodes
    assert not any(isinstance(reply, Refused) for _, reply in found)
    assert grid.asking <= 60.0 / (1 + replies.REST) + nodes * question
    late = nodes * question + replies.FLOWERS_PAUSE
    assert grid.now - nodes * question <= 60.0 + late  # and none waits for long


def test_what_came_in_the_last_pause_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SlowGrid(100, 0.01, done=9.9)
    monkeypatch.setattr(replies, "time", grid)
    asked = [Message(RecordDict(), node, MessageType.TRAIN) for node in grid.get_node_ids()]
    found = list(replies.exchange(grid, asked, 10.0))
    assert not any(isinstance(reply, Refused) for _, reply in found)
