"""Update rules: how one gradient moves the weights, on clients and on the server alike."""

from prefed.rules.adagrad import AdaGrad
from prefed.rules.adam import Adam, Yogi
from prefed.rules.covariance import SHAPES, Covariance
from prefed.rules.rule import RULES, Field, Fraction, Rule, State
from prefed.rules.sgd import SGD

__all__ = [
    "RULES", "SGD", "SHAPES", "AdaGrad", "Adam", "Covariance", "Field", "Fraction", "Rule", "State",
    "Yogi",
]  # fmt: skip
