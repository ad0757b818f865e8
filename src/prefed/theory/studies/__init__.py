"""The three studies of `prefed theory`: what they measure, and what their reports say."""

from prefed.theory.studies import bounds, constants, noise
from prefed.theory.studies.base import Study

STUDIES = {
    "constants": Study("measured constants", constants.pieces, constants.study),
    "bounds": Study("bounds and rates", bounds.pieces, bounds.study),
    "noise": Study("noise and preconditioners", noise.pieces, noise.study),
}
