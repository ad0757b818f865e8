"""The ClientApp's part: a node's answers to the four stages."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from prefed.core.errors import PrefedError
from prefed.flower.secure import stages as m
from prefed.flower.secure.party import Party
from prefed.flower.secure.stages import Unexpected, read

if TYPE_CHECKING:
    from prefed.flower.hosting import Host

MakeHost = Callable[[Message, Context], "Host"]
Place = Callable[[Context], tuple[int, int]]

STATE = "prefed-secure"
"""Where a party's secrets wait for the next message: Flower has them in the SuperNode's memory."""
OPTION = "secure-aggregation"


def is_wanted(context: Context) -> bool:
    """Whether the run, or the owner of this node, wants no update to leave it in the clear."""
    return any(bool(c.get(OPTION)) for c in (context.run_config, context.node_config))


def refuse_in_the_clear(context: Context) -> None:
    if is_wanted(context):
        raise PrefedError(
            f"{OPTION} is set for this run or on this node, and the server asks for an update in "
            f"the clear"
        )


def add_stages(app: ClientApp, place: Place, make_host: MakeHost) -> None:
    """Answer the stages of secure aggregation."""

    def party_of(context: Context) -> Party:
        held = context.state.get(STATE)
        return Party(held if isinstance(held, ConfigRecord) else None)

    def reply(message: Message, context: Context, party: Party, content: dict[str, Any]) -> Message:
        context.state[STATE] = ConfigRecord(party.record)
        return Message(RecordDict(content), reply_to=message)

    @app.query(m.KEYS)
    def keys(message: Message, context: Context) -> Message:
        party, number = party_of(context), place(context)[0]
        answer = party.keys(message.content.get(m.RECORD), number)
        return reply(message, context, party, {m.RECORD: answer})

    @app.query(m.SHARES)
    def shares(message: Message, context: Context) -> Message:
        party = party_of(context)
        answer = party.shares(message.content.get(m.RECORD))
        return reply(message, context, party, {m.RECORD: answer})

    @app.train(m.MASKED)
    def masked(message: Message, context: Context) -> Message:
        party, ask = party_of(context), message.content.get(m.RECORD)
        party.take_shares(ask)
        common = m.common(message.content)
        host = make_host(message, context)
        if host.ask.round != party.record[m.ROUND]:
            raise Unexpected("the round that is asked for is not that of the session")
        found = host.train_for_sum(**read(ask, exponents=[int], total_weight=int,
                                          largest_weight=int))  # fmt: skip
        if found is None:  # nothing has left: the others do without this node
            party.forget()
            answer = ConfigRecord({m.NOT_FINITE: True})
            return reply(message, context, party, {m.RECORD: answer})
        vector, about = found
        party.mask(vector.view(np.uint64), common)
        content = {m.VECTOR: ArrayRecord({m.VECTOR: Array(vector)}), **about}
        return reply(message, context, party, content)

    @app.query(m.UNMASK)
    def unmask(message: Message, context: Context) -> Message:
        party = party_of(context)
        answer = party.unmask(message.content.get(m.RECORD))
        return reply(message, context, party, {m.RECORD: answer})
