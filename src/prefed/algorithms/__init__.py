"""Algorithms: each a client rule, a server rule and a sharing policy, one file each."""

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.sharing import Policy, average, derived, keep, reset

__all__ = ["ALGORITHMS", "Algorithm", "Policy", "average", "derived", "keep", "reset"]
