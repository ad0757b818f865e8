"""Changes to a config from the command line: --set key=value."""

import tomllib
from collections.abc import Collection, Iterable
from typing import Any

from prefed.core.errors import PrefedError

INSTEAD = {"local_steps": "local_epochs", "local_epochs": "local_steps"}
"""Settings that a change of the other puts out of force."""
SEEDS = "--seeds says how many there are, from 0 on"


def make_change(
    table: dict[str, Any], change: str, settings: Collection[str]
) -> tuple[str, Any] | None:
    """Carry out "a.b=value" on the table. A key that does not begin with one of these settings is
    handed back: it may be an option of the algorithm, which is not known before all changes are
    made."""
    key, separator, text = change.partition("=")
    key = key.strip()
    if not separator or not key:
        raise PrefedError(f"--set {change}: should have the form key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    path = key.split(".")
    if path[0] not in settings:
        return key, value
    if isinstance(value, str) and key in ("algorithm", "model", "data", "data.split", "loss"):
        value = {"name": value}
        if key == "data":
            value = {**table.get("data", {}), **value}
    assign(table, path, value, change)
    table.pop(INSTEAD.get(key, ""), None)
    return None


def refuse(changes: Iterable[str], **reasons: str) -> None:
    """Raise if one of these settings is changed, or a part of it that says which it is."""
    for change in changes:
        key = change.partition("=")[0].strip()
        if (reason := reasons.get(key.removesuffix(".name"))) is not None:
            raise PrefedError(f"--set {change}: {reason}")


def assign(table: dict[str, Any], path: list[str], value: Any, change: str) -> None:
    """Set the value at the path, making tables on the way; `change` is what an error names."""
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if isinstance(inner, str):
            inner = table[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise PrefedError(f"{change}: {part} is not a table")
        table = inner
    table[path[-1]] = value
