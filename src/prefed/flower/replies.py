"""Messages out, replies back as they come, and no wait without an end.

Flower's own send_and_receive holds all replies at once, asks every three seconds, and fails as a
whole if one of them cannot be decoded. Here each reply is fetched by itself and handed on before
the next is.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import WARNING
from typing import Any

import httpx
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from flwr.supercore import log

from prefed.training.admission import Refused

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
REST, FLOWERS_PAUSE = 4.0, 3.0
"""After asking in vain, wait so many times as long as that took, but not longer than Flower does: a
SuperLink needs milliseconds for every question (bench/superlink.py), and has others to serve."""

Training = Callable[[Grid, list[Message], float], Iterator[Message]]
"""The replies to the messages of a round, within so many seconds."""


def exchange(
    grid: Grid, messages: Sequence[Message], seconds: float
) -> Iterator[tuple[Message, Message | Refused]]:
    """Each message with its reply, or with the reason why there is none, until all have
    come or `seconds` have passed."""
    end = time.monotonic() + seconds
    pushed = set(grid.push_messages(messages))
    waiting: dict[str, Message] = {}
    for message in messages:
        if message.metadata.message_id in pushed:
            waiting[message.metadata.message_id] = message
        else:
            yield message, Refused("the message could not be sent to its node")
    pause = FIRST_PAUSE
    is_last = False  # one more look at the end, at what came while it paused
    while waiting and (is_last or time.monotonic() < end):
        is_last = False
        began, arrived = time.monotonic(), False
        for number in list(waiting):
            found = _fetch(grid, number)
            if found is not None:
                arrived = True
                message = waiting.pop(number)
                yield message, _from_its_node(message, found)
        asking = 0.0 if arrived else time.monotonic() - began
        pause = FIRST_PAUSE if arrived else min(2 * pause, LONGEST_PAUSE)
        left = end - time.monotonic()
        if waiting and left > 0:
            time.sleep(min(max(pause, min(REST * asking, FLOWERS_PAUSE)), left))
            is_last = time.monotonic() >= end
    for message in waiting.values():
        yield message, Refused(f"no answer within {seconds:g} s")


def _from_its_node(message: Message, reply: Message | Refused) -> Message | Refused:
    if isinstance(reply, Refused) or reply.metadata.src_node_id == message.metadata.dst_node_id:
        return reply
    return Refused(f"node {reply.metadata.src_node_id} answered for it")


def _fetch(grid: Grid, number: str) -> Message | Refused | None:
    try:
        replies = list(grid.pull_messages([number]))
    except httpx.HTTPError:
        raise  # the SuperLink is gone, not the client
    except Exception as error:  # a reply that Flower itself cannot decode
        return Refused(f"its reply cannot be read: {type(error).__name__}: {str(error)[:200]}")
    for reply in replies:
        if reply.metadata.reply_to_message_id == number:
            if reply.has_error():
                return Refused(f"failed: {str(reply.error.reason)[:500]} ({reply.error.code})")
            return reply
    return None


class AsTheyCome:
    """A grid that hands replies on as they come, and not when the last is there."""

    def __init__(self, grid: Grid, training: Training) -> None:
        self.grid, self.training = grid, training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        seconds, sent = timeout or math.inf, list(messages)
        if any(message.metadata.message_type == MessageType.TRAIN for message in sent):
            return self.training(self.grid, sent, seconds)
        return _replies(self.grid, sent, seconds)


def _replies(grid: Grid, messages: list[Message], timeout: float) -> Iterator[Message]:
    for message, reply in exchange(grid, messages, timeout):
        if isinstance(reply, Refused):
            log(WARNING, "node %d: %s", message.metadata.dst_node_id, reply)
        else:
            yield reply
