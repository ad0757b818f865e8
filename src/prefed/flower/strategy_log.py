"""What a strategy says in Flower's log."""

import textwrap
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from flwr.app import RecordDict
from flwr.supercore import log

from prefed.algorithms import Algorithm
from prefed.flower import protocol as p
from prefed.rules import SGD

if TYPE_CHECKING:
    from prefed.flower.strategy import Strategy


def summary(strategy: "Strategy") -> None:
    """What it will do."""
    log(INFO, "\t├──> %s settings:", type(strategy.algorithm).__name__)
    options = ", ".join(f"{key}={value!r}" for key, value in strategy.algorithm)
    for line in textwrap.wrap(options, 52, break_long_words=False):
        log(INFO, "\t│\t%s", line)
    log(INFO, "\t├──> Sampling:")
    log(INFO, "\t│\t├──Fraction: train (%.2f) | evaluate ( %.2f)",
        strategy.fraction_train, strategy.fraction_evaluate)  # fmt: skip
    log(INFO, "\t│\t├──Minimum nodes: train (%d) | evaluate (%d)",
        strategy.min_train_nodes, strategy.min_evaluate_nodes)  # fmt: skip
    log(INFO, "\t│\t├──Minimum available nodes: %d", strategy.min_available_nodes)
    log(INFO, "\t│\t└──Usable updates needed: %.2f of a cohort, asked again %d times",
        strategy.min_fraction, strategy.retries)  # fmt: skip
    log(INFO, "\t└──> Keys in records:")
    log(INFO, "\t\t├── Weighted by: '%s'", strategy.weighted_by_key)
    log(INFO, "\t\t├── ArrayRecord key: '%s'", strategy.arrayrecord_key)
    log(INFO, "\t\t└── ConfigRecord key: '%s'", strategy.configrecord_key)


def received(stage: str, results: int, failures: int) -> None:
    log(INFO, "aggregate_%s: Received %d results and %d failures", stage, results, failures)


def own_training(algorithm: Algorithm, contents: list[RecordDict]) -> None:
    """Warn of clients that do not follow the rule that the algorithm has for them."""
    own = sum(p.TRAINED not in content["metrics"] for content in contents)
    if own and algorithm.client_rule() != SGD():
        log(WARNING, "%d of %d clients train in their own way: %s has a rule for clients, "
            "which prefed.flower.local_train in the ClientApp follows",
            own, len(contents), type(algorithm).__name__)  # fmt: skip
