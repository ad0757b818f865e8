"""Who is asked in a round, and who of them answers."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefed.core import draws
from prefed.training import stragglers
from prefed.training.server_state import Server
from prefed.training.trainer import Record

if TYPE_CHECKING:
    from prefed.training.run import Run


@dataclass(frozen=True)
class Cohort:
    clients: list[int]
    """All that are asked."""
    answers: list[int]
    """Those that train, and send what they have."""
    server: Server
    """What they begin with: the global state, and after how many steps slow ones stop."""
    record: Record
    """For the record of the round: what is known before they train."""


def ask(run: "Run") -> Cohort:
    """Draw the cohort of the next round, and who of it answers."""
    settings, server, clients = run.settings, run.server, run.draw_cohort()
    answers, told = clients, run.trainer.told(server)
    if not run.trainer.is_asynchronous:
        answers = draws.answering(settings.seed, server.round, clients, settings.client_dropout)
    if run.clock is not None:  # speeds and deadlines say who is slow
        began, _ = run.clock.begin(server.round, run.seconds_virtual)
        closed = run.clock.close(server, began, clients, answers)
        return Cohort(clients, closed.answers, replace(server, limits=closed.limits), closed.record)
    answers, limits = stragglers.slowed(settings, run.data, server.round, clients, answers)
    if limits:
        server, told = replace(server, limits=limits), told | {"partial": len(limits)}
    return Cohort(clients, answers, server, told)
