"""Clients that are too slow, as in the experiments of Li et al. 2020 (FedProx): a share of each
cohort, whatever their devices. With devices, speeds and deadlines say who is slow (clock.py)."""

from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.data import FederatedData
from prefed.training.settings import Settings


def check(settings: Settings, lockstep: bool, simulates: bool) -> None:
    """Raise an error where there can be no stragglers."""
    if settings.stragglers and not simulates:
        raise PrefedError(
            "stragglers: they are of simulations; here clients are real, and slow by themselves. "
            "Leave it out"
        )
    if settings.stragglers and lockstep and settings.straggler_work == "partial":
        raise PrefedError(
            "stragglers: clients of this algorithm meet in every step, so none can stop before the "
            'others; set straggler_work = "drop"'
        )


def stragglers(settings: Settings, round: int, cohort: list[int]) -> list[int]:
    """The slow clients of a cohort: their share of it as a whole number, drawn uniformly."""
    count = int(settings.stragglers * len(cohort) + 0.5)
    if not count:
        return []
    drawn = draws.generator(settings.seed, "stragglers", round)
    return [cohort[i] for i in drawn.choice(len(cohort), count, replace=False)]


def slowed(
    settings: Settings, data: FederatedData, round: int, cohort: list[int], answers: list[int]
) -> tuple[list[int], dict[int, int]]:
    """Those of a cohort who answer still, and the local steps of those who stop early."""
    slow = {*stragglers(settings, round, cohort)}
    if not slow:
        return answers, {}
    if settings.straggler_work == "drop":
        return [client for client in answers if client not in slow], {}
    return answers, limits(settings, data, round, [c for c in answers if c in slow])


def limits(
    settings: Settings, data: FederatedData, round: int, stragglers: list[int]
) -> dict[int, int]:
    """After how many local steps each of these stops: those of 1 to all local epochs, or 1 to all
    local steps, each number with the same chance."""
    found = {}
    for client in stragglers:
        steps = settings.local_steps or settings.steps(len(data.client(client)))
        parts = settings.local_epochs or steps
        done = draws.generator(settings.seed, "straggler work", round, client).integers(parts)
        found[client] = steps // parts * (int(done) + 1)
    return found
