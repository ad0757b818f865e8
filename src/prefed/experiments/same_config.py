"""Whether the run in a directory is the one that is asked for, by its config."""

import hashlib
import re
from pathlib import Path
from typing import Any

from prefed.core.deprecated import with_new_names
from prefed.experiments.config import Config
from prefed.experiments.toml_files import read_toml

MAY_CHANGE = ("  kept_state: ", "  workers: ")
"""How a difference between configs begins that does not make another run: results are the same."""
UP_TO_ROUNDING = ("  engine: ",)
"""The same for results that are the same up to rounding: what has ended is not run again for it."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config of the run in a directory, in the words of this version."""
    table = read_toml(folder / "config.toml")
    renamed: dict[str, Any] = with_new_names(table, Config.RENAMED, warn=False)
    return renamed


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def with_rounds(text: str, rounds: int) -> str:
    """The text of a config.toml for that number of rounds: the first such line is the run's."""
    return re.sub(r"^rounds = \d+$", f"rounds = {rounds}", text, count=1, flags=re.MULTILINE)


def about_rounds(differences: list[str], resume: bool) -> list[str]:
    """More about a run that differs in nothing but a number of rounds."""
    if differences[0].startswith("  rounds: ") and len(differences) == 1:
        return ["with --resume a run can be given more rounds; it cannot be given fewer"]
    falls = [line.strip() for line in differences if ".rounds: " in line]
    if resume and len(falls) == len(differences) - 1 and differences[-1].startswith("  rounds: "):
        parts = [line.removeprefix("algorithm.").partition(" there") for line in falls]
        options = " ".join(f"--set {part[0].replace(': ', '=')}" for part in parts)
        return [f"its step sizes fall over a number of rounds: to keep that add {options}"]
    return []


def differing(there: dict[str, Any], here: dict[str, Any], ended: bool = False) -> list[str]:
    """One line for each key that makes another run of it.

    ended   the run that is there has ended, and is not to go on
    """
    may_change = MAY_CHANGE + UP_TO_ROUNDING if ended else MAY_CHANGE
    return [line for line in diff(there, here) if not line.startswith(may_change)]


def diff(there: dict[str, Any], here: dict[str, Any], path: str = "") -> list[str]:
    """One line for each key whose value differs."""
    lines = []
    for key in sorted({*there, *here}):
        a, b = there.get(key, "(not set)"), here.get(key, "(not set)")
        if isinstance(a, dict) and isinstance(b, dict):
            lines += diff(a, b, f"{path}{key}.")
        elif a != b:
            lines.append(f"  {path}{key}: {a} there, {b} asked for")
    return lines
