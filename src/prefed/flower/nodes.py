"""Which nodes are there, and which clients live on them.

Flower's node ids are random; what stays the same is the partition id in a node's own config. A node
of a deployed config hosts the clients whose number, modulo the number of partitions, is its
partition id: one each if there are as many nodes as clients.
"""

import time
from collections.abc import Callable
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from prefed.core.errors import RunFailed
from prefed.flower import protocol as p
from prefed.flower.replies import exchange
from prefed.training.admission import Refused

PAUSE = 1.0
QUERY_SECONDS = 60.0
"""How long a new node may hold up a round."""
FIRST_BREAK, LONGEST_BREAK = 20.0, 3600.0
"""Seconds after which a node that was refused is asked again; doubled each time."""

Identify = Callable[[ConfigRecord], int]
"""The number of a node from what it says about itself, or Refused."""


class Nodes:
    """The nodes that are there, each under a number that stays the same.

    identify   asked about each new node; without it a node's number is the id that Flower gave it
    """

    def __init__(self, identify: Identify | None) -> None:
        self.identify = identify
        self.nodes: dict[int, int] = {}
        """Number -> Flower's node id."""
        self._breaks: dict[int, tuple[float, float]] = {}
        """Of nodes that were refused: until when, and how long."""

    def wait(self, grid: Grid, enough: Callable[[], bool], seconds: float) -> bool:
        """Until there are enough, or this many seconds have passed; whether there are enough."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(grid, max(1.0, end - time.monotonic()))
            if enough() or time.monotonic() >= end:
                return enough()
            time.sleep(PAUSE)

    def gather(self, grid: Grid, needed: int, seconds: float) -> None:
        """Wait for so many; RunFailed if they do not come."""
        told = -1

        def enough() -> bool:
            nonlocal told
            there = len(self.nodes)
            if there < needed and there != told:
                log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).",
                    there, needed)  # fmt: skip
                told = there
            return there >= needed

        if not self.wait(grid, enough, seconds):
            raise RunFailed(
                f"{len(self.nodes)} nodes are there after {seconds:g} s, {needed} are needed"
            )

    def refresh(self, grid: Grid, seconds: float) -> None:
        """See who has come and who has gone; ask those who are new."""
        present = set(grid.get_node_ids())
        for number, node in list(self.nodes.items()):
            if node not in present:
                log(WARNING, "node %d is gone", number)
                del self.nodes[number]
        new = present - {*self.nodes.values()}
        if self.identify is None:
            self.nodes |= {node: node for node in new}
            return
        now, seconds = time.monotonic(), min(seconds, QUERY_SECONDS)
        asked = sorted(n for n in new if now >= self._breaks.get(n, (now, 0.0))[0])
        messages = [Message(RecordDict(), n, MessageType.QUERY, ttl=seconds) for n in asked]
        for message, reply in exchange(grid, messages, seconds):
            node = message.metadata.dst_node_id
            try:
                self._enter(node, reply)
            except Refused as problem:
                log(WARNING, "node %d is not used: %s", node, problem)
                pause = min(2 * self._breaks.get(node, (0.0, FIRST_BREAK / 2))[1], LONGEST_BREAK)
                self._breaks[node] = (time.monotonic() + pause, pause)

    def _enter(self, node: int, reply: Message | Refused) -> None:
        assert self.identify is not None
        if isinstance(reply, Refused):
            raise reply
        about = reply.content.get(p.NODE)
        if not isinstance(about, ConfigRecord):
            raise Refused("it did not say which partition it has")
        number = self.identify(about)
        if number in self.nodes:
            raise Refused(f"partition {number} has a node already")
        self.nodes[number] = node


def partition_id(about: ConfigRecord) -> int:
    number = about.get(p.PARTITION)
    if type(number) is not int or number < 0:
        raise Refused("its partition is not a number")
    return number


class Partitions:
    """How the clients of a deployed config are divided among nodes, which all must agree on."""

    def __init__(self, config: str, clients: int) -> None:
        self.config, self.clients = config, clients
        self.count: int | None = None

    def identify(self, about: ConfigRecord) -> int:
        if about.get(p.CONFIG) != self.config:
            raise Refused("its app holds another config")
        partition, partitions = partition_id(about), about.get(p.PARTITIONS)
        if type(partitions) is not int:
            raise Refused("its number of partitions is not a number")
        if not partition < partitions <= max(self.clients, 1):
            raise Refused(
                f"partition {partition} of {partitions}; there are {self.clients} clients"
            )
        if self.count not in (None, partitions):
            raise Refused(f"it counts {partitions} partitions, others {self.count}")
        self.count = partitions
        return partition

    def of(self, client: int) -> int | None:
        """The partition that a client lives on, once a node has said how many there are."""
        return None if self.count is None else p.hosted(client, self.count)
