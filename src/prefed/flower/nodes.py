"""Which nodes are there, and which clients live on them.

Flower's node ids are random; what stays the same is the partition id in a node's own config. A node
hosts the clients whose number, modulo the number of partitions, is its partition id: one each if
there are as many nodes as clients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from prefed.admission import Refused
from prefed.flower import protocol as p
from prefed.flower.exchange import exchange

PAUSE = 1.0
QUERY_SECONDS = 60.0
"""So long a newcomer may hold up a round."""
FIRST_BREAK, LONGEST_BREAK = 20.0, 3600.0
"""Seconds after which a node that was turned away is asked again, twice as many each time."""


class Nodes:
    def __init__(self, grid: Grid, config: str, clients: int) -> None:
        self.grid, self.config, self.clients = grid, config, clients
        self.partitions: int | None = None
        self.nodes: dict[int, int] = {}
        """Partition -> node id."""
        self._breaks: dict[int, tuple[float, float]] = {}
        """Of nodes that were turned away: until when, and how long."""

    def of(self, client: int) -> int | None:
        """The node that a client lives on, if it is there."""
        return (
            None if self.partitions is None else self.nodes.get(p.hosted(client, self.partitions))
        )

    def wait(self, clients: Sequence[int], seconds: float) -> None:
        """Until each of these clients has its node, or so many seconds have passed."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(max(1.0, end - time.monotonic()))
            if all(self.of(c) is not None for c in clients) or time.monotonic() >= end:
                break
            time.sleep(PAUSE)
        log(INFO, "%d of %s partitions have a node", len(self.nodes), self.partitions or "?")

    def refresh(self, seconds: float) -> None:
        """See who has come and who has gone; ask those who are new."""
        present = set(self.grid.get_node_ids())
        for partition, node in list(self.nodes.items()):
            if node not in present:
                log(WARNING, "the node of partition %d is gone", partition)
                del self.nodes[partition]
        known = {*self.nodes.values()}
        now = time.monotonic()
        new = [n for n in present - known if now >= self._breaks.get(n, (now, 0.0))[0]]
        seconds = min(seconds, QUERY_SECONDS)
        messages = [Message(RecordDict(), n, MessageType.QUERY, ttl=seconds) for n in sorted(new)]
        for message, reply in exchange(self.grid, messages, seconds):
            node = message.metadata.dst_node_id
            problem = reply if isinstance(reply, Refused) else self._enter(node, reply)
            if problem is not None:
                log(WARNING, "node %d is not used: %s", node, problem)
                pause = min(2 * self._breaks.get(node, (0.0, FIRST_BREAK / 2))[1], LONGEST_BREAK)
                self._breaks[node] = (time.monotonic() + pause, pause)

    def _enter(self, node: int, reply: Message) -> Refused | None:
        about = reply.content.get(p.NODE)
        if not isinstance(about, ConfigRecord):
            return Refused("it did not say which partition it has")
        partition, partitions = about.get(p.PARTITION), about.get(p.PARTITIONS)
        if about.get(p.CONFIG) != self.config:
            return Refused("its app holds another config")
        if type(partition) is not int or type(partitions) is not int:
            return Refused("its partition is not a number")
        if not 0 <= partition < partitions <= max(self.clients, 1):
            return Refused(
                f"partition {partition} of {partitions}; there are {self.clients} clients"
            )
        if self.partitions not in (None, partitions):
            return Refused(f"it counts {partitions} partitions, others {self.partitions}")
        if partition in self.nodes:
            return Refused(f"partition {partition} has a node already")
        self.partitions = partitions
        self.nodes[partition] = node
        return None
