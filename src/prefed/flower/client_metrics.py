"""What clients of a Flower app say of themselves, in metrics."""

import math
import operator
from typing import Any

from flwr.app import MetricRecord, RecordDict

from prefed.flower import protocol as p
from prefed.training.admission import LARGEST_COUNT


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
