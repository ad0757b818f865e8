"""Means over a cohort that bear some clients who lie or break, one file per family."""

from prefed.training.means.mean_rule import MEANS, MeanRule, Plain

__all__ = ["MEANS", "MeanRule", "Plain"]
