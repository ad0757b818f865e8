"""Algorithms: each a client rule, a server rule and a sharing policy, one file each."""

from prefed.algorithms.base import ALGORITHMS, Algorithm

__all__ = ["ALGORITHMS", "Algorithm"]
