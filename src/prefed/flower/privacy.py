"""Central differential privacy in drop-in strategies, for those who count with Flower's accountant;
prefed.Privacy is for all algorithms, and both clip and draw with the same code.

Flower's wrappers add the noise to what a strategy returns, which for an adaptive one is the model
after the server's step: the noise no longer fits the step's scale, and P has been built from what
was never noised. Here the mean change is noised first, and all that the server rule does with it, P
included, is post-processing: the guarantee is that of the noised mean.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.training.mechanism import clipped, normal

if TYPE_CHECKING:
    from flwr.supercore.privacy_accounting import GaussianPrivacyEvent, PrivacyAccountant


@dataclass
class CentralDP:
    """Each client's change is clipped to `clip_norm`; Gaussian noise of noise_multiplier*clip_norm
    goes onto their sum, which is divided by the number of clients asked, answered or not.

    One client more or less moves the sum by clip_norm at most, which is the relation that the
    accountant must have (add or remove one). Without an accountant of Flower's, nobody counts.
    """

    noise_multiplier: float
    clip_norm: float
    accountant: "PrivacyAccountant | None" = None
    seed: int | None = None
    """For tests: noise that can be foretold protects nobody."""
    _releases: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise PrefedError(f"noise_multiplier: should be above 0, not {self.noise_multiplier}")
        if not self.clip_norm > 0:
            raise PrefedError(f"clip_norm: should be above 0, not {self.clip_norm}")
        if self.accountant is not None:
            relation = self.accountant.config.neighboring_relation.value
            sampling = self.accountant.config.sampling_method.value
            if relation != "add-or-remove-one" or sampling != "no-amplification":
                raise PrefedError(
                    f"accountant: the noise is that of add-or-remove-one without amplification "
                    f"by sampling, not of {relation} with {sampling}"
                )

    def clip(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return values | {"weights": clipped(values["weights"].unsqueeze(0), self.clip_norm)[0]}

    def noise(self, mean: Tensor, answered: int, asked: int) -> Tensor:
        """The mean over those who answered as the noised sum over those asked."""
        draw = normal(self.seed, "weights", self._releases, mean)
        self._releases += 1
        deviation = self.noise_multiplier * self.clip_norm / asked
        return (mean.double() * (answered / asked) + deviation * draw).to(mean.dtype)

    def event(self, asked: int) -> "GaussianPrivacyEvent":
        from flwr.supercore.privacy_accounting import GaussianPrivacyEvent

        assert self.accountant is not None
        population = self.accountant.config.population_size
        return GaussianPrivacyEvent(self.noise_multiplier, asked, population)

    def check_budget(self, asked: int) -> None:
        """Raise before a round that would spend more than the accountant allows."""
        from flwr.serverapp.exception import PrivacyBudgetExhausted

        accountant = self.accountant
        if accountant is None or accountant.config.max_epsilon is None:
            return
        if accountant.would_exceed(self.event(asked)):
            spent = accountant.get_privacy_spent()
            raise PrivacyBudgetExhausted(
                f"the next round would spend more than epsilon = {accountant.config.max_epsilon:g} "
                f"(now {spent.epsilon:.4g} at delta = {spent.delta:g})"
            )

    def spend(self, asked: int) -> None:
        if self.accountant is not None:
            self.accountant.compose(self.event(asked))
