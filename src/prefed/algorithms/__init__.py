"""Algorithms: each a client rule, a server rule and a sharing policy, one file each."""

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm

__all__ = ["ALGORITHMS", "Algorithm"]
