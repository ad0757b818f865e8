"""The updates of one cohort: accepted or refused, and added up as they arrive."""

from collections.abc import Callable, Sequence
from logging import WARNING

from flwr.supercore import log
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.training.admission import Admission, NotFinite, Refused, UntrustedUpdate
from prefed.training.asynchronous import ONE_PROCESS
from prefed.training.attackers import Attackers
from prefed.training.mean import Mean
from prefed.training.settings import Settings

Values = dict[str, Tensor]


class Arrivals:
    """Holds a running mean over the cohort's positions and not the updates: a few vectors if
    they come in order, whatever the size of the cohort, and the same bits in any order. A mean
    that is not plain holds the updates."""

    def __init__(
        self,
        admission: Admission,
        cohort: Sequence[int],
        weight: Callable[[int, int], float],
        averaged: Callable[[UntrustedUpdate], Values],
        mean: Mean | None = None,
    ) -> None:
        """weight     of a client, given its number and how many samples it has
        averaged   what is added up of an accepted update
        mean       what adds them up, if it is not the plain mean
        """
        self.admission, self.weight, self.averaged = admission, weight, averaged
        self.position = {client: position for position, client in enumerate(cohort)}
        self.mean = Mean() if mean is None else mean
        self.refused: dict[int, Refused] = {}
        """The clients without an admitted update, and why."""

    @property
    def round(self) -> int:
        """Counted from 1."""
        return self.admission.round + 1

    @property
    def missing(self) -> list[int]:
        return [c for c in self.position if c not in self.admission.admitted]

    @property
    def diverged(self) -> bool:
        """Every client has answered or failed, and all with numbers that are not finite."""
        return len(self.refused) == len(self.position) and all(
            isinstance(reason, NotFinite) for reason in self.refused.values()
        )

    def take(self, client: int, read: Callable[[], UntrustedUpdate]) -> UntrustedUpdate | None:
        """The update that `read` makes of what came for `client`, if it is accepted."""
        try:
            update = read()
            if update.client != client:
                raise Refused(f"it speaks for client {update.client!r}")
            self.admission.admit(update)
        except Refused as reason:
            self.refuse(client, reason)
            return None
        except Exception as error:  # what a hostile update may make a library raise
            self.refuse(client, Refused(f"cannot be read: {type(error).__name__}: {error}"))
            return None
        self.refused.pop(client, None)
        position, weight = self.position[client], self.weight(client, update.samples)
        self.mean.add(position, self.averaged(update), weight, update.loss)
        return update

    def refuse(self, client: int, reason: Refused) -> None:
        if client not in self.admission.admitted:
            self.refused[client] = reason
        log(WARNING, "round %d, client %d: %s", self.round, client, reason)

    def reasons(self) -> list[str]:
        return [f"client {client}: {reason}" for client, reason in sorted(self.refused.items())]


def check_deployable(algorithm: Algorithm, settings: Settings, clients: int) -> None:
    """Raise if this cannot be run by so many clients that live on nodes."""
    refuse_lockstep(algorithm)
    if settings.asynchronous is not None:
        raise PrefedError(ONE_PROCESS)
    attackers = Attackers.of(settings, clients)
    if attackers is not None and attackers.attack.colludes:
        raise PrefedError(
            "attackers: these liars have to know what honest clients send, which nodes do not; "
            "try them in a simulation (prefed run)"
        )


def refuse_lockstep(algorithm: Algorithm) -> None:
    if algorithm.client_rule().lockstep:
        raise PrefedError(
            f"{type(algorithm).__name__}: its clients meet in every local step, which would take "
            f"a message per step; it runs in simulation only"
        )
