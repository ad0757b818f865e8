"""Things as values that a TOML file can hold."""

from collections.abc import Mapping
from datetime import date, time
from typing import Any


def name_of(thing: Any) -> str:
    """What is written down of a thing that lives in Python alone: "module:name"."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(kind, '__module__', '?')}:{getattr(kind, '__qualname__', '?')}"


def plain(value: Any) -> Any:
    """The same in numbers, words, lists and tables. TOML has no null: None is left out."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value if item is not None]
    return value if isinstance(value, str | int | float | date | time) else name_of(value)
