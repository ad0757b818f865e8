"""Whether the ClientApp of a client is made for an algorithm, by what it answers."""

from collections.abc import Collection

from flwr.app import RecordDict

from prefed.algorithms import Algorithm
from prefed.flower import protocol as p
from prefed.flower.client_metrics import said_steps
from prefed.training.admission import Refused

LOCAL_TRAIN = """Let its train function end in

    return prefed.flower.local_train(message, context, model, batches)

in place of its own training and reply; batches are pairs (x, y), one for each step. More is in \
docs/flower.md."""


class Unfit(Refused):
    """The app of the client was not made for the algorithm."""


def check_fit(
    algorithm: Algorithm, shared: Collection[str], learns_steps: bool, content: RecordDict
) -> None:
    """Unfit if the reply shows that its app does not know of what the algorithm needs: the state
    that is shared, or the number of its steps."""
    name = type(algorithm).__name__
    if shared and p.STATE not in content:
        raise Unfit(
            f"the reply has no record {p.STATE!r} ({' and '.join(shared)} of its "
            f"optimiser): the ClientApp does not train by the rule of {name}. {LOCAL_TRAIN} "
            f"FedAdam, PreFedOpt and others whose rule is on the server take the ClientApp as "
            f"it is."
        )
    followed = any(p.TRAINED in record for record in content.metric_records.values())
    if algorithm.personal and not followed:
        raise Unfit(
            f"the ClientApp sends all of its model, and a part of it should stay with the "
            f"client (personal={algorithm.personal}). {LOCAL_TRAIN}"
        )
    if learns_steps and said_steps(content) is None:
        off = ", or set per_step=False" if getattr(algorithm, "per_step", False) else ""
        raise Unfit(
            f"the reply has no metric {p.STEPS!r}, by which {name} divides. Give local_steps= "
            f"to the strategy, return {p.STEPS!r} (a whole number, 1 or more) with the metrics "
            f"of the train function{off}."
        )
