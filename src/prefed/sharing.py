"""Sharing policies: what happens to a piece of client state at the end of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policy:
    kind: Literal["reset", "keep", "average"]
    follow: Literal["mean", "participation"] = "mean"


def reset() -> Policy:
    """Forgotten: a client begins each round with the first value."""
    return Policy("reset")


def keep() -> Policy:
    """Stays with the client until it takes part again. Costs no communication."""
    return Policy("keep")


def average(*, follow: Literal["mean", "participation"] = "mean") -> Policy:
    """Goes up to the server with the weights, is averaged, and comes down to the next cohort.

    The server's copy becomes the mean of the cohort, or, with follow="participation", moves
    towards it by the cohort's share of all clients (SCAFFOLD: each client speaks for itself).
    """
    return Policy("average", follow)


BY_NAME = {"reset": reset, "keep": keep, "average": average}
