"""Does a package that is installed here have a known hole?

    python scripts/audit.py                    asks the OSV database (osv.dev)
    python scripts/audit.py --database FILE    looks into a file (scripts/advisories.py)

One question with the names and versions of everything in this environment. Exit 1 if something is
known; without an answer from the network, one line that says so and exit 0, so that `make check`
works offline. A file that cannot be read is an error, exit 2: who gives one wants an audit.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from http.client import HTTPException
from importlib.metadata import distributions
from pathlib import Path

from advisories import BadDatabase, known_holes

URL = "https://api.osv.dev/v1/querybatch"
SECONDS = 5.0
ACCEPTED: dict[str, str] = {}
"""Holes that do not concern us: identifier, and why."""


def installed() -> dict[str, str]:
    """Versions by name, without the label of a build ("+cpu"), which no database knows."""
    found = {d.metadata["Name"]: d.version.partition("+")[0] for d in distributions()}
    return {name: found[name] for name in sorted(found) if name.lower() != "prefed"}


def ask(packages: dict[str, str], url: str) -> list[list[str]]:
    """For each package, the identifiers of what is known about it."""
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        for name, version in packages.items()
    ]
    body = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        results = json.load(answer)["results"]
    if len(results) != len(packages):
        raise ValueError("an answer of another length than the question")
    return [[str(hole["id"]) for hole in result.get("vulns", [])] for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=URL)
    parser.add_argument("--database", type=Path, help="an export of OSV's, or pip-audit's JSON")
    options = parser.parse_args()
    packages, source = installed(), ""
    try:
        if options.database is None:
            found = ask(packages, options.url)
        else:
            found, count = known_holes(options.database, packages)
            source = f" against {count} entries of {options.database}"
    except BadDatabase as error:
        print(f"dependencies: not audited, {options.database}: {error}")
        return 2
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"dependencies: not audited, the advisory service gave no answer ({error})")
        return 0
    known = 0
    for (name, version), holes in zip(packages.items(), found, strict=True):
        for hole in holes:
            known += hole not in ACCEPTED
            why = f" (accepted: {ACCEPTED[hole]})" if hole in ACCEPTED else ""
            print(f"{name} {version}: {hole}{why}")
    print(f"dependencies: {len(packages)} audited{source}, {known} with a known hole")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
