"""Does the preconditioner do anything? Two numbers a round, and a warning if not."""

import warnings
from typing import Any

from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.parts import timed
from prefed.core.schedule import at
from prefed.rules.grouped import by_coordinate
from prefed.training.server_state import Server

SAMPLE = 100_000
"""Coordinates looked at: all of a small model, every n-th of a large one."""
COLLAPSED_SHARE, COLLAPSED_ROUNDS = 0.01, 5


class CollapseWarning(UserWarning):
    """An adaptive server rule has become SGD."""


@timed("diagnostics")
def diagnose(algorithm: Algorithm, server: Server, round: int) -> dict[str, float]:
    """For adaptive rules: the share of coordinates with sqrt(P) > tau, and the median of
    lr / (sqrt(P) + tau), or with tau inside of the root where the rule has it there. Empty for
    others."""
    sides = (
        (algorithm.server_rule(), server.optimiser, algorithm.server_lr),
        (algorithm.client_rule(), server.shared, algorithm.client_lr),
    )
    for rule, state, rate in sides:
        found = rule.preconditioner()
        if found is not None and found[0] in state:
            rule, P = rule.fit(server.layout), state[found[0]]
            gathered = state.get(f"{found[0]}_mass")
            mass = 1.0 if gathered is None else float(gathered) or 1.0
            root = (_sample(rule.diagonal(P)) / mass).sqrt().double()
            tau: Tensor | float = rule.damping(P, mass)
            if state is server.shared and any(group.tau for group in algorithm.groups):
                own = algorithm.groups, server.layout, "tau", float(tau)
                tau = _sample(by_coordinate(*own, root.dtype, root.device))
            inside = getattr(rule, "tau_inside", False)
            damped = (root.square() + tau**2).sqrt() if inside else root + tau
            return {
                "adaptive_share": float((root > tau).double().mean()),
                "median_step": at(rate, round) / float(damped.median()),
            }
    return {}


def _sample(P: Tensor) -> Tensor:
    return P[:: max(1, len(P) // SAMPLE)]


class CollapseWatch:
    """Warns once when a server rule stays with a share under 1 % for five rounds."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.server_side = algorithm.server_rule().preconditioner()
        self.rounds = 0

    def see(self, diagnosis: dict[str, Any]) -> None:
        if self.server_side is None or "adaptive_share" not in diagnosis:
            return
        self.rounds = self.rounds + 1 if diagnosis["adaptive_share"] < COLLAPSED_SHARE else 0
        if self.rounds == COLLAPSED_ROUNDS:
            tau = self.server_side[1]
            relative = getattr(self.algorithm, "tau_relative", None)
            now = f"tau (now {tau})" if relative is None else f"tau_relative (now {relative})"
            per_step = getattr(self.algorithm, "per_step", False)
            warnings.warn(
                f"{type(self.algorithm).__name__} has collapsed to SGD on the server: for "
                f"{COLLAPSED_ROUNDS} rounds the preconditioner's root has been below tau in over "
                f"99 % of the coordinates, so each step is about server_lr/tau times the change. "
                f"Lower {now}{' or set per_step=false' if per_step else ''}.",
                CollapseWarning,
                stacklevel=2,
            )
