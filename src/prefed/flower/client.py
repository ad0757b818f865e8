"""The ClientApp of a deployed config: local_update, behind a message."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from prefed.core.errors import PrefedError
from prefed.flower import protocol as p

if TYPE_CHECKING:
    from prefed.data import FederatedData

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
        partition, partitions = _place(context)
        about = {p.PARTITION: partition, p.PARTITIONS: partitions, p.CONFIG: p.fingerprint(text)}
        return Message(RecordDict({p.NODE: ConfigRecord(about)}), reply_to=message)  # type: ignore[arg-type]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(_train(text, data, message.content, context), reply_to=message)

    return app


def _place(context: Context) -> tuple[int, int]:
    partition = context.node_config.get(p.PARTITION)
    partitions = context.node_config.get(p.PARTITIONS)
    if not (isinstance(partition, int) and isinstance(partitions, int) and partition < partitions):
        raise PrefedError(
            f"this SuperNode does not know its part of the data: start it with --node-config "
            f"'{p.PARTITION}=0 {p.PARTITIONS}=4', where {p.PARTITION} counts from 0"
        )
    return partition, partitions


def _train(text: str, own: OwnData | None, asked: RecordDict, context: Context) -> RecordDict:
    # torch is loaded here: a query is answered without it.
    import torch

    from prefed.experiments.config import load
    from prefed.flower.kept_state import KeptState, state_directory
    from prefed.flower.wire import pack_message, unpack
    from prefed.training.admission import Spec, broadcast
    from prefed.training.engines.sequential import Sequential
    from prefed.training.messages import upload
    from prefed.training.round import Server, first_kept

    ask = p.Ask.read(asked.get(p.ASK))
    if ask.config != p.fingerprint(text):
        raise PrefedError("the server runs another config than this node's app holds")
    partition, partitions = _place(context)

    run = load(tomllib.loads(text)).make_run()
    algorithm, task, data = run.algorithm, run.task, run.data
    if own is not None:
        data = _own_data(data, own(context))
    state = unpack(asked[p.SERVER], broadcast(algorithm, run.server))
    state = {name: value.to(task.device) for name, value in state.items()}
    weights, buffers = state.pop("weights"), state.pop("buffers", run.server.buffers)
    steps = torch.tensor(ask.steps, device=task.device)
    first = run.server
    server = Server(ask.round, weights, buffers, {}, state, first.layout, steps, first.personal)

    keeps = first_kept(algorithm, task.flat)
    specs = {n: Spec(tuple(v.shape), v.dtype) for n, v in keeps.items()}
    store = KeptState(state_directory(dict(context.node_config)), ask.run)
    engine = Sequential(task, data, run.settings)
    reply = RecordDict()
    for client, last in zip(ask.clients, ask.after, strict=True):
        if p.hosted(client, partitions) != partition:
            raise PrefedError(f"client {client} does not live on partition {partition}")
        began = store.read(client, last, specs) if keeps else None
        kept = {} if began is None else {client: {n: v.to(task.device) for n, v in began.items()}}
        update = engine.update(algorithm, server, [client], kept)
        message, stays = upload(algorithm, server, update, [client], kept, run.settings.seed)
        if keeps:
            store.write(client, ask.round, {n: v[0] for n, v in stays.items()})
        reply[p.update_key(client)] = pack_message(message)
        reply[p.about_key(client)] = MetricRecord(
            {
                p.CLIENT: client,
                p.ROUND: ask.round,
                p.SAMPLES: len(data.client(client)),
                p.LOSS: float(update.losses[0]),
                p.AFTER: last if began is not None else -1,
            }
        )
    return reply


def _own_data(data: "FederatedData", samples: Any) -> "FederatedData":
    """The config's data with this node's samples in place of every client's."""
    from prefed.core.losses import are_labels
    from prefed.data import FederatedData

    class Own:
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, client: int) -> Any:
            return samples

    made = FederatedData(Own(), data.test, data.transform, data.augment)
    found, wanted = made.client(0).y, data.client(0).y
    if are_labels(found) != are_labels(wanted):
        raise PrefedError(f"y of this node is {found.dtype}, that of the config {wanted.dtype}")
    return made
