"""Known holes from a file, for machines without a network: what scripts/audit.py --database reads.

Three forms are understood: an export of the OSV database (a zip or a directory of JSON files, one
for each advisory), a JSON file with one advisory or a list of them, and the JSON that `pip-audit
--format json` writes on a machine that has a network.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

LARGEST = 50 * 2**20
"""Bytes of one JSON document."""


class BadDatabase(ValueError):
    """The file is none that can be audited with."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def known_holes(path: Path, packages: dict[str, str]) -> tuple[list[list[str]], int]:
    """For each package, the identifiers of what is known about it; and how many advisories, or
    packages that were audited elsewhere, there were to look at."""
    holes: dict[str, set[str]] = {name: set() for name in packages}
    by_name = {canonical(name): name for name in packages}
    looked, missing = 0, set[str]()
    for document in _documents(path):
        if isinstance(document, dict) and isinstance(document.get("dependencies"), list):
            missing |= set(packages)
            for found in document["dependencies"]:
                name = by_name.get(canonical(str(found.get("name"))))
                version = str(found.get("version")).partition("+")[0]
                if name is not None and version == packages[name] and "vulns" in found:
                    looked += 1
                    missing.discard(name)
                    holes[name] |= {str(hole["id"]) for hole in found["vulns"]}
            continue
        for advisory in document if isinstance(document, list) else [document]:
            looked += 1
            if not isinstance(advisory, dict) or "id" not in advisory:
                raise BadDatabase("a document that is no advisory of OSV's form")
            for affected in advisory.get("affected", []) if not advisory.get("withdrawn") else []:
                package = affected.get("package", {})
                name = by_name.get(canonical(str(package.get("name"))))
                ours = package.get("ecosystem") == "PyPI" and name is not None
                if ours and is_affected(packages[name], affected):
                    holes[name].add(str(advisory["id"]))
    if not looked:
        raise BadDatabase("nothing in it concerns this environment")
    if missing:
        raise BadDatabase(f"it was made without {', '.join(sorted(missing))} in this version")
    return [sorted(holes[name]) for name in packages], looked


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    """As the OSV format defines it: listed by name, or between the events of a range. A version
    that cannot be compared counts as affected: better a false alarm than a hole."""
    if version in affected.get("versions", []):
        return True
    for span in affected.get("ranges", []):
        if span.get("type") == "GIT":
            continue
        try:
            if _within(Version(version), span.get("events", [])):
                return True
        except InvalidVersion:
            return True
    return False


def _within(version: Version, events: list[dict[str, str]]) -> bool:
    inside = False

    def place(event: dict[str, str]) -> tuple[Version, bool]:
        (kind, text), *_ = event.items()
        return Version(text), kind == "last_affected"

    for event in sorted((e for e in events if "limit" not in e), key=place):
        (kind, text), *_ = event.items()
        edge = Version(text)
        if version > edge or (version == edge and kind != "last_affected"):
            inside = kind == "introduced"
    return inside


def _documents(path: Path) -> Iterator[Any]:
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield _parsed(file.read_bytes())
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for item in archive.infolist():
                    if item.filename.endswith(".json"):
                        with archive.open(item) as stream:
                            yield _parsed(stream.read(LARGEST + 1))
        else:
            with open(path, "rb") as stream:
                yield _parsed(stream.read(LARGEST + 1))
    except (OSError, zipfile.BadZipFile) as error:
        raise BadDatabase(str(error)) from None


def _parsed(data: bytes) -> Any:
    if len(data) > LARGEST:
        raise BadDatabase(f"a document of more than {LARGEST >> 20} MB")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadDatabase(f"no JSON: {error}") from None
