"""The ClientApp of a deployed config."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from prefed.core.errors import PrefedError
from prefed.flower import protocol as p
from prefed.flower.secure import node as secure

if TYPE_CHECKING:
    from prefed.flower.hosting import Host

OwnData = Callable[[Context], Any]
"""Makes the pair (x, y) of this node's own samples."""


def client_app(config: str | Path, data: OwnData | None = None) -> ClientApp:
    """A ClientApp that trains as the config in the file says.

    data   for samples that only this node has: called with the node's context, returns (x, y).
           Without it each node makes the config's data set and takes its own part.
    """
    app, text = ClientApp(), Path(config).read_text()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        partition, partitions = place(context)
        about = {p.PARTITION: partition, p.PARTITIONS: partitions, p.CONFIG: p.fingerprint(text)}
        return Message(RecordDict({p.NODE: ConfigRecord(about)}), reply_to=message)  # type: ignore[arg-type]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        secure.refuse_in_the_clear(context)
        return Message(_host(message, context).train(), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        secure.refuse_in_the_clear(context)
        return Message(_host(message, context).evaluate(), reply_to=message)

    def _host(message: Message, context: Context) -> "Host":
        from prefed.flower.hosting import Host  # and torch: a query is answered without it

        return Host(text, data, message.content, context)

    secure.add_stages(app, place, _host)
    return app


def place(context: Context) -> tuple[int, int]:
    """The partition of this node, and how many there are."""
    partition = context.node_config.get(p.PARTITION)
    partitions = context.node_config.get(p.PARTITIONS)
    if not (isinstance(partition, int) and isinstance(partitions, int) and partition < partitions):
        raise PrefedError(
            f"this SuperNode does not know its part of the data: start it with --node-config "
            f"'{p.PARTITION}=0 {p.PARTITIONS}=4', where {p.PARTITION} counts from 0"
        )
    return partition, partitions
