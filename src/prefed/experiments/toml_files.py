"""TOML files: configs, studies and tables, the user's own and those that come with prefed."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from prefed.core.errors import PrefedError, checked, did_you_mean
from prefed.core.safe_files import read_whole

M = TypeVar("M", bound=BaseModel)

KINDS = {"presets": "preset", "studies": "study", "tables": "table"}
"""Folders with TOML files that come with prefed, and what one of them is."""


def presets() -> list[str]:
    return shipped("presets")


def studies() -> list[str]:
    return shipped("studies")


def tables() -> list[str]:
    return shipped("tables")


def shipped(folder: str) -> list[str]:
    """The names of the TOML files that come with prefed."""
    names = (path.name for path in files("prefed").joinpath(folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find(folder: str, source: str) -> Path:
    """The TOML file that `source` is the path of, or the name in a folder of prefed's."""
    if source in (known := shipped(folder)):
        return Path(str(files("prefed").joinpath(folder, f"{source}.toml")))
    if not Path(source).is_file():
        raise PrefedError(f"{source}: no such file or {KINDS[folder]}{did_you_mean(source, known)}")
    return Path(source)


def read(source: str) -> dict[str, Any]:
    """The table in a TOML file, or in the preset of that name."""
    if Path(source).is_dir() and source not in presets():
        raise PrefedError(f"{source}: is a directory; a run's config is the config.toml in it")
    if (kind := kind_of(source)) != "config":
        raise PrefedError(f"{source}: is a {kind}, not a config; `prefed {kind} {source}` runs it")
    return read_toml(find("presets", source))


def kind_of(source: str) -> str:
    """What a file, or a name, is of: a "config", a "study" or a "table"."""
    if source in presets():
        return "config"
    if not Path(source).is_file():
        return "study" if source in studies() else "table" if source in tables() else "config"
    keys = {*read_toml(Path(source))}
    if "config" not in keys or {"algorithm", "data"} & keys:
        return "config"
    return "table" if "cells" in keys else "study"


def read_plan(model: type[M], folder: str, source: str) -> tuple[str, M]:
    """The name of a study or a table, and its content."""
    path = find(folder, source)
    table = read_toml(path)
    if {"algorithm", "data"} <= {*table}:
        kind = KINDS[folder]
        raise PrefedError(f"{source}: is a config, not a {kind}; `prefed run {source}` runs it")
    return path.stem, checked(model, table, prefix=f"{path.name}: ")


LONGEST_FILE, LONGEST_LINE = 1 << 18, 10_000
"""Of a config, in characters: some that are longer take the parser for ever."""


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file, whatever is in the file."""
    try:
        text = read_whole(path).decode()
        if len(text) > LONGEST_FILE or any(len(line) > LONGEST_LINE for line in text.splitlines()):
            raise PrefedError(f"{path}: is too long for a config")
        return tomllib.loads(text)
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error.strerror or error}") from None
    except PrefedError:
        raise
    except (ValueError, RecursionError) as error:  # also numbers and nesting without end
        raise PrefedError(f"{path}: not valid TOML: {error}") from None
