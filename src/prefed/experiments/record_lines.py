"""Records of rounds as lines of rounds.jsonl, whoever wrote them."""

import json
from typing import Any

from prefed.training.trainer import Record

NUMBERS = ("round", "bytes_up", "bytes_down", "seconds")
"""What every record has."""
OPTIONAL = (
    "train_loss", "test_loss", "test_accuracy", "adaptive_share", "median_step",
    "client_lr", "server_lr", "update_norm", "drift", "epsilon", "clip",
    "bytes_up_weights", "bytes_up_state", "bytes_down_weights", "bytes_down_state",
    "client_accuracy_mean", "client_accuracy_worst_tenth",
    "client_loss_mean", "client_loss_worst_tenth",
    "staleness_mean", "staleness_max",
    "seconds_virtual", "device_seconds", "wasted_device_seconds", "wasted_bytes_up",
    "wasted_bytes_down", "objective", "objective_gap",
)  # fmt: skip
"""Numbers that may be null or missing."""
LISTS = ("cohort", "dropped", "left_out", "client_accuracies", "client_losses")
"""Lists of numbers that may be missing."""


class NotARecord(ValueError):
    """JSON, but not what is known of a round."""


def from_json(line: str) -> Record:
    """The record that a line holds, whoever wrote the line."""
    return check_record(json.loads(line))


def check_record(record: Any) -> Record:
    if not isinstance(record, dict) or any(record.get(key) is None for key in NUMBERS):
        raise NotARecord(str(record)[:80])
    if not all(isinstance(record.get(key), int | float | None) for key in NUMBERS + OPTIONAL):
        raise NotARecord(str(record)[:80])
    for values in (record[key] for key in LISTS if record.get(key) is not None):
        if not isinstance(values, list) or not all(
            isinstance(v, int | float | None) for v in values
        ):
            raise NotARecord(str(record)[:80])
    return record
