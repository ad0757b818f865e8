"""What clients of a Flower app say of themselves, in metrics."""

import math
import operator
import statistics
from collections.abc import Callable
from logging import WARNING
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.supercore import log

from prefed.flower import protocol as p
from prefed.training.admission import LARGEST_COUNT

FAR = 100
"""Times the median: a number of local steps beyond it is not believed."""

MetricsOf = Callable[[list[RecordDict], str], MetricRecord]
"""(replies, the metric they are weighted by) -> the metrics of a round."""


def whole(number: object) -> object:
    """100 for 100.0: templates say either."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def said_steps(content: RecordDict) -> int | None:
    """The number of local steps that a reply tells."""
    for record in content.metric_records.values():
        steps = whole(record.get(p.STEPS))
        if type(steps) is int and 1 <= steps <= LARGEST_COUNT:
            return steps
    return None


def believed_steps(mean: float, contents: list[RecordDict], known: int | None) -> float:
    """The mean number of local steps, without what is far above the median: no single client can
    move it far.

    mean    of all that was said
    known   how many each client takes, if the strategy was told
    """
    said = [n for content in contents if (n := said_steps(content)) is not None]
    if not said:
        return mean
    if known is not None:
        if any(n != known for n in said):
            log(WARNING, "local_steps is %d, and clients say that they took %d to %d",
                known, min(said), max(said))  # fmt: skip
        return mean
    most = FAR * statistics.median_low(said)
    if max(said) <= most:
        return mean
    log(WARNING, "a client says that it took %d local steps, and others about %d: it is not "
        "counted", max(said), most // FAR)  # fmt: skip
    return statistics.fmean(n for n in said if n <= most)


def reduced(
    reduce: MetricsOf | None, contents: list[RecordDict], weighted_by: str
) -> MetricRecord | None:
    """The metrics of a round, by a function of the user's own or as the mean."""
    if not contents:
        return None
    try:
        return (reduce or mean_metrics)(contents, weighted_by)
    except Exception as error:  # metrics are what clients made of them; a run goes on without
        log(WARNING, "the metrics could not be reduced: %s", error)
        return None


def mean_metrics(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
    """The weighted mean of each finite number, or list of them, that all clients report."""
    records = [next(iter(content.metric_records.values())) for content in contents]
    weights = [float(record[weighted_by]) for record in records]  # type: ignore[arg-type]
    result: dict[str, Any] = {}
    for key, first in records[0].items():
        values: list[Any] = [record.get(key) for record in records]
        lists = [value if isinstance(value, list) else [value] for value in values]
        numbers = all(isinstance(v, int | float) and math.isfinite(v) for row in lists for v in row)
        alike = {(isinstance(v, list), len(row)) for v, row in zip(values, lists, strict=True)}
        if key not in (weighted_by, p.TRAINED) and numbers and len(alike) == 1:
            columns = zip(*lists, strict=True)
            means = [sum(map(operator.mul, weights, column)) / sum(weights) for column in columns]
            result[key] = means if isinstance(first, list) else means[0]
    return MetricRecord(result)
