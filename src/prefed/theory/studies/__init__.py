"""The three studies of `prefed theory`: what they measure, and what their reports say."""

from prefed.theory.studies import bounds_study, constants_study, noise_study
from prefed.theory.studies.common import Study

STUDIES = {
    "constants": Study("measured constants", constants_study.pieces, constants_study.study),
    "bounds": Study("bounds and rates", bounds_study.pieces, bounds_study.study),
    "noise": Study("noise and preconditioners", noise_study.pieces, noise_study.study),
}
