"""Sharing policies: what happens to a piece of client state at the end of a round."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, PositiveInt

from prefed.codecs import CodecName

ALWAYS = 2
"""In the first two rounds everything that is averaged is sent: the server begins with zero, which
is no preconditioner, and the mean after one round still depends on it."""

NO_MEAN = (
    "clients work it out from their other state, or count with it, so a mean over clients says "
    'nothing; let it be "reset" or "keep"'
)
"""Why a field that is a cache cannot be averaged."""

Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Policy:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: Literal["reset", "keep", "average", "derived"]
    follow: Literal["mean", "participation"] | Share = "mean"
    codec: CodecName = "exact"
    every: PositiveInt = 1
    between: Literal["server", "keep"] = "server"

    def sent(self, round: int) -> bool:
        """Whether it goes up in this round (from 0)."""
        if self.kept_between:
            return (round + 1) % self.every == 0
        return self.kind == "average" and (round < ALWAYS or round % self.every == 0)

    @property
    def kept_between(self) -> bool:
        """Whether clients go on with their own between two rounds in which it is averaged."""
        return self.kind == "average" and self.between == "keep"

    def is_newer(self, last: int, round: int) -> bool:
        """Of what a client keeps between: whether what it has from the round `last` is newer, in
        this round, than the server's copy. Otherwise an average has been due since."""
        return last // self.every == round // self.every

    def share(self, participation: float) -> float:
        """By how much the server's copy moves towards the mean of a cohort that is such a share of
        all clients."""
        if self.follow == "participation":
            return participation
        return 1.0 if self.follow == "mean" else self.follow

    def in_rounds(self, every: int) -> "Policy":
        """The same, sent only in rounds whose number is a multiple of `every`."""
        return replace(self, every=every)

    @property
    def comes_down(self) -> bool:
        """Whether the server has it, and clients begin a round with the server's."""
        return self.kind in ("average", "derived")


_made = cache(Policy)
"""They are asked for in every round, and checked once."""


def reset() -> Policy:
    """Forgotten: a client begins each round with the first value."""
    return _made("reset")


def keep() -> Policy:
    """Stays with the client until it takes part again. Costs no communication."""
    return _made("keep")


def average(
    *,
    follow: Literal["mean", "participation"] | float = "mean",
    codec: str = "exact",
    every: int = 1,
    between: Literal["server", "keep"] = "server",
) -> Policy:
    """Goes up to the server with the weights, is averaged, and comes down to the next cohort.

    The server's copy becomes the mean of the cohort, or, with follow="participation", moves
    towards it by the cohort's share of all clients (SCAFFOLD: each client speaks for itself), or by
    a share that is given: then it is a moving average over rounds (MimeLite).

    codec: how it is written into the message (prefed.codecs).

    every: sent in the first two rounds and then in each round whose number, from 0, is a multiple
    of this. In the others the server's copy stands still. Clients begin with it in every round, so
    it comes down in every round: a cohort that is drawn anew does not have it.

    between: with "keep", clients go on with their own between two averages (DES-LOC, Iacob et al.
    2025). It is sent in each `every`-th round: `every` - 1, 2*every - 1, ..., counted from 0. A
    client begins with its own if it has taken part since an average was last due, and else with
    the server's copy, whether it was there at the average or not; before the first average that
    is the first value. So the copy comes down in every round here, too.
    """
    return _made("average", follow, codec, every, between)


def derived() -> Policy:
    """Comes down to the clients and never goes up: the server works it out (Algorithm.derive)."""
    return _made("derived")
