"""What rounds cost, counted by Google's dp-accounting and by nothing else.

A round releases a Gaussian of `noise` times the clip, over a sum to which a client adds at most the
clip in norm. What the library is told of it:

    sampling  neighbours  accountant  event of a round
    poisson   add-remove  rdp, pld    Poisson sampling with q of a Gaussian with `noise`
    poisson   replace     pld         the same; the library doubles the sensitivity
    fixed     add-remove  rdp, pld    a Gaussian with `noise`: no amplification by sampling
    fixed     replace     rdp         sampling without replacement of a Gaussian with noise / 2
    fixed     replace     pld         a Gaussian with noise / 2: no amplification
    where = "client"                  a Gaussian with noise / 2, in each round of that client

Replacing a client moves the sum by twice the clip. The library's accountant by privacy loss
distributions knows that; the one by Renyi divergences takes the noise in units of the sensitivity.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prefed.core.errors import PrefedError
from prefed.training.privacy_setting import Privacy

MISSING = "privacy: epsilon is counted by dp-accounting: pip install 'prefed[privacy]'"


@dataclass(frozen=True)
class Accountant:
    """Counts rounds that are all alike.

    clients   how many there are
    cohort    how many of them a round asks, or is expected to
    """

    kind: str
    sampling: str
    neighbours: str
    delta: float
    clients: int
    cohort: int

    @classmethod
    def of(cls, privacy: Privacy, clients: int, cohort: int) -> "Accountant":
        local = privacy.where == "client"
        sampling, neighbours = (
            ("none", "replace") if local else (privacy.sampling, privacy.neighbours)
        )
        return cls(privacy.accountant, sampling, neighbours, privacy.delta, clients, cohort)

    def epsilon(self, noise: float, rounds: int) -> float:
        """Of so many rounds with this noise multiplier."""
        if rounds == 0:
            return 0.0
        if self.kind == "pld":
            return _pld_epsilon(self, noise, rounds)
        from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

        orders, rdp = _rdp(self, noise)  # what is composed, Renyi divergences add up
        with _quiet():
            return float(compute_epsilon(orders, rounds * rdp, self.delta)[0])

    def noise_for(self, epsilon: float, rounds: int) -> float:
        """The least noise multiplier with which so many rounds stay within epsilon."""
        return _noise_for(self, epsilon, rounds)

    def fresh(self) -> Any:
        """An accountant of the library's that has counted nothing."""
        _library()
        from dp_accounting import NeighboringRelation as Relation
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant

        replaces = self.neighbours == "replace"
        relation = Relation.REPLACE_ONE if replaces else Relation.ADD_OR_REMOVE_ONE
        make = RdpAccountant if self.kind == "rdp" else PLDAccountant
        return make(neighboring_relation=relation)

    def event(self, noise: float) -> Any:
        """One round, as the library is told of it."""
        library = _library()
        replaces, rdp = self.neighbours == "replace", self.kind == "rdp"
        gaussian = library.GaussianDpEvent(noise / 2 if replaces and rdp else noise)
        if self.sampling == "poisson":
            return library.PoissonSampledDpEvent(self.cohort / self.clients, gaussian)
        if self.sampling == "fixed" and replaces and rdp:
            return library.SampledWithoutReplacementDpEvent(self.clients, self.cohort, gaussian)
        return gaussian


@lru_cache(maxsize=64)
def _rdp(accountant: Accountant, noise: float) -> tuple[Any, Any]:
    """The orders, and the Renyi divergence of one round at each."""
    with _quiet():
        counted = accountant.fresh().compose(accountant.event(noise))
    return counted.orders, counted.rdp


@lru_cache(maxsize=1024)
def _pld_epsilon(accountant: Accountant, noise: float, rounds: int) -> float:
    counted = accountant.fresh().compose(accountant.event(noise), rounds)
    return float(counted.get_epsilon(accountant.delta))


@lru_cache(maxsize=64)
def _noise_for(accountant: Accountant, epsilon: float, rounds: int) -> float:
    library = _library()
    from dp_accounting.mechanism_calibration import NoBracketIntervalFoundError as NoneFound

    def event(noise: float) -> Any:
        return library.SelfComposedDpEvent(accountant.event(noise), rounds)

    start = library.LowerEndpointAndGuess(0.05, 1.0)
    with _quiet():
        try:
            found = library.calibrate_dp_mechanism(
                accountant.fresh, event, epsilon, accountant.delta, start
            )
        except (ValueError, RuntimeError, NoneFound) as error:
            raise PrefedError(
                f"privacy.epsilon: no noise was found for epsilon = {epsilon:g} over {rounds} "
                f"rounds ({str(error).partition(chr(10))[0]}); give noise_multiplier"
            ) from None
    return float(found)


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise PrefedError(MISSING) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for each order of a Renyi divergence that does not converge: it is left out,
    which can make epsilon larger and never smaller."""
    log = logging.getLogger("absl")
    before, log.level = log.level, logging.ERROR
    try:
        yield
    finally:
        log.level = before
