"""User-level differential privacy as a setting: what is asked for. mechanism.py does it, and
accounting.py counts it."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from prefed.core.errors import PrefedError, checked, explain

Share = Annotated[float, Field(gt=0, lt=1)]


class _Value(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class AdaptiveClip(_Value):
    """Andrew et al. 2021: the clip follows a quantile of the norms of the clients' changes.

    C = C * exp(-rate * (b - quantile)),  b the noised share of clients with a norm up to C
    """

    start: PositiveFloat = 0.1
    """The first clip."""
    quantile: Share = 0.5
    """The share of clients whose change should not be clipped."""
    rate: PositiveFloat = 0.2
    """How fast the clip moves: by this factor, as an exponent, in a round."""
    count_noise: PositiveFloat | None = None
    """The deviation of the noise on the number of clients below the clip; None is a twentieth of a
    cohort, or noise_multiplier if that is more. What it tells is paid by a little more noise on the
    sum: noise_multiplier is of both."""


class Privacy(_Value):
    """What a client does to the model, whatever its samples are, is hidden in Gaussian noise.

    Each client's contribution is clipped, noise of noise_multiplier * clip goes onto their sum, and
    the sum is divided by the number of clients asked or expected, whoever answers.
    """

    noise_multiplier: PositiveFloat | None = None
    """The deviation of the noise on the sum, in units of the clip. None: the least with which all
    rounds of the run stay within epsilon."""
    clip: PositiveFloat | AdaptiveClip = 1.0
    """The largest norm of a client's change of the weights; or a table {quantile = 0.5, start =
    0.1, rate = 0.2}: a clip that follows a quantile of the norms."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The chance that the guarantee allows itself; below one over the number of clients."""
    epsilon: PositiveFloat | None = None
    """The budget: the run ends before the round that would pass it. None: it is counted only."""
    sampling: Literal["poisson", "fixed"] = "poisson"
    """Each client joins a round by itself with the chance clients_per_round / clients ("poisson"),
    so that cohorts have a random size, or cohorts have the "fixed" size clients_per_round."""
    neighbours: Literal["add-remove", "replace"] = "add-remove"
    """What is hidden: whether a client takes part at all ("add-remove"), or which of any two data
    sets it has ("replace")."""
    accountant: Literal["rdp", "pld"] = "rdp"
    """How epsilon is computed: Renyi divergences, or privacy loss distributions, which are tighter
    and slower."""
    where: Literal["server", "client"] = "server"
    """Who adds the noise: the server, once for the sum; or each "client" to what it sends (local
    differential privacy), for clients that do not trust the server."""
    state: Literal["separate", "joint"] = "separate"
    """Fields of the client rule that are averaged (m, P, v, c) are clipped each by itself and take
    their share of the budget, or as one vector with the change of the weights ("joint")."""
    state_clip: dict[str, PositiveFloat] = {}
    """For each such field the clip of its change: {m = 0.5, P = 0.1}, for P that of its root."""
    state_share: Share | dict[str, Share] = 0.5
    """The share of the budget that separate fields take in all, or each of them."""
    second_moments: Literal["root", "log"] = "root"
    """P and v go through their "root" or their "log"arithm, and are never below zero after it."""
    secret_noise: bool = False
    """Noise and cohorts from the system's randomness, in place of draws that follow from the seed.
    Deployments always do so."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise PrefedError("\n".join(explain(error, type(self)))) from None

    @field_validator("clip", mode="before")
    @classmethod
    def _from_table(cls, given: Any) -> Any:
        return checked(AdaptiveClip, given) if isinstance(given, Mapping) else given

    @field_validator("state_share")
    @classmethod
    def _leaves_some(cls, share: Any, info: ValidationInfo) -> Any:
        if isinstance(share, dict) and math.fsum(share.values()) >= 1:
            raise ValueError("the shares should leave some of the budget to the weights")
        return share

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("noise_multiplier: is required; or give a budget, epsilon")
        if isinstance(self.state_share, dict) and self.state_share.keys() != self.state_clip.keys():
            raise ValueError("state_share: should name the fields that state_clip names")
        if self.where == "client" and self.adaptive:
            raise ValueError('clip: should be a number with where="client"')
        if self.where == "client" and self.state_clip:
            raise ValueError('state_clip: with where="client" clients send weights alone')
        poisson = self.sampling == "poisson" and self.where == "server"
        if poisson and self.neighbours == "replace" and self.accountant == "rdp":
            raise ValueError(
                'neighbours: "replace" with Poisson sampling is for accountant="pld"; '
                'or take sampling="fixed"'
            )
        return self

    @property
    def adaptive(self) -> AdaptiveClip | None:
        return self.clip if isinstance(self.clip, AdaptiveClip) else None

    @property
    def first_clip(self) -> float:
        return self.clip.start if isinstance(self.clip, AdaptiveClip) else self.clip

    def shares(self) -> dict[str, float]:
        """The share of the budget of each field that state_clip names."""
        if isinstance(self.state_share, dict):
            return dict(self.state_share)
        return {name: self.state_share / len(self.state_clip) for name in self.state_clip}
