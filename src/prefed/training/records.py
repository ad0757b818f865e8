"""Records of rounds that stay in memory until the end of a run."""

from array import array
from collections.abc import Iterator
from typing import Any

COHORT = "cohort"
LARGE = 100
"""Clients of a cohort from which on it is worth it."""


class Compact(dict[str, Any]):
    """A record whose cohort takes four bytes a client, a tenth of a list of numbers. Whoever looks
    at it sees the list, which is made anew each time."""

    def __getitem__(self, key: str) -> Any:
        return _seen(super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return _seen(super().get(key, default))

    def pop(self, key: str, *default: Any) -> Any:
        return _seen(super().pop(key, *default))

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __iter__(self) -> Iterator[str]:  # what dict() and ** look at: without it, they copy all
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    def __repr__(self) -> str:
        return repr(dict(self))


def compact(record: dict[str, Any]) -> dict[str, Any]:
    """The record, in little memory; as it is if its cohort is small."""
    cohort = record.get(COHORT)
    if not isinstance(cohort, list) or len(cohort) < LARGE:
        return record
    try:
        return Compact(record | {COHORT: array("i", cohort)})
    except (TypeError, OverflowError):  # from a file: nobody's clients
        return record


def _seen(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value
