"""What a release consists of: a bill of materials in the CycloneDX form (JSON, version 1.6).

    python scripts/sbom.py FILE... > prefed.cdx.json      FILEs are the wheel and the sdist

The versions are those of this environment, which are the pinned and tested ones; the hashes are
those of requirements.lock. What only tests and documentation need is not part of a release.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from lock import LOCK, Lock, canonical, read
from packaging.requirements import Requirement

NOT_SHIPPED = ("test", "docs")
Bom = dict[str, Any]


def bill(files: Sequence[Path], lock: Lock) -> Bom:
    own = distribution("prefed")
    extras = sorted(set(own.metadata.get_all("Provides-Extra") or []) - set(NOT_SHIPPED))
    required, optional = closure("prefed", [""]), closure("prefed", ["", *extras])
    root = reference(own)
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    made = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    about = {
        **component(own, {}),
        "externalReferences": [
            {"type": "distribution", "url": name, "hashes": [sha256(digest)]}
            for name, digest in digests.items()
        ],
    }
    others = {name: optional[name] for name in sorted(optional) if name != "prefed"}
    text = json.dumps([digests, sorted(reference(distribution(name)) for name in others)])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, root + text)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", made),
            "tools": {"components": [{"type": "application", "name": "scripts/sbom.py"}]},
            "component": about,
        },
        "components": [
            component(distribution(name), lock)
            | {"scope": "required" if name in required else "optional"}
            for name in others
        ],
        "dependencies": [
            {"ref": reference(distribution(name)),
             "dependsOn": sorted(reference(distribution(n)) for n in needs)}
            for name, needs in sorted(optional.items())
        ],
    }  # fmt: skip


def closure(name: str, extras: Sequence[str]) -> dict[str, set[str]]:
    """All that a package needs here, directly or not, and what each of them needs. What is not
    installed is left out: its version is not known."""
    found: dict[str, set[str]] = {}
    asked: set[tuple[str, str]] = set()
    waiting = [(canonical(name), extra) for extra in extras]
    while waiting:
        name, extra = item = waiting.pop()
        if item in asked:
            continue
        asked.add(item)
        needs = found.setdefault(name, set())
        for text in distribution(name).requires or []:
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                continue
            other = canonical(need.name)
            try:
                distribution(other)
            except PackageNotFoundError:
                continue
            needs |= {other} - {name}
            waiting += [(other, wanted) for wanted in ("", *need.extras)]
    return found


def reference(package: Distribution) -> str:
    """Its package URL, without the label of a build ("+cpu")."""
    name, version = canonical(package.metadata["Name"]), package.version.partition("+")[0]
    return f"pkg:pypi/{name}@{version}"


def component(package: Distribution, lock: Lock) -> Bom:
    url = reference(package)
    name, version = canonical(package.metadata["Name"]), url.partition("@")[2]
    about: Bom = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    pinned, hashes = lock.get(name, ("", set()))
    if pinned == version:
        about["hashes"] = [sha256(digest) for digest in sorted(hashes)]
    if licence := package.metadata.get("License-Expression"):
        about["licenses"] = [{"expression": licence}]
    elif licence := _named_licence(package):
        about["licenses"] = [{"license": {"name": licence}}]
    return about


def sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


def _named_licence(package: Distribution) -> str:
    marks = [m for m in package.metadata.get_all("Classifier") or [] if m.startswith("License ::")]
    text = marks[0].rpartition(" :: ")[2] if marks else package.metadata.get("License") or ""
    return text.strip().partition("\n")[0][:100]


TYPES = {"application", "framework", "library", "container", "platform", "operating-system",
         "device", "device-driver", "firmware", "file", "machine-learning-model", "data",
         "cryptographic-asset"}  # fmt: skip


def problems(bom: Bom) -> list[str]:
    """What the specification asks for and the bill has not: fields, forms, references."""
    found = []
    if bom.get("bomFormat") != "CycloneDX" or bom.get("specVersion") != "1.6":
        found.append("bomFormat and specVersion must be CycloneDX and 1.6")
    uid = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    if not re.fullmatch(f"urn:uuid:{uid}", str(bom.get("serialNumber"))):
        found.append("serialNumber must be a urn:uuid")
    if not isinstance(bom.get("version"), int) or bom["version"] < 1:
        found.append("version must be a whole number from 1 on")
    about = bom.get("metadata", {}).get("component", {})
    everything = [about, *bom.get("components", [])]
    for item in everything:
        name = item.get("name")
        if not name or item.get("type") not in TYPES:
            found.append(f"{name}: a component needs a name and a type of the specification's")
        for digest in item.get("hashes", []):
            if digest.get("alg") != "SHA-256" or not re.fullmatch(
                "[0-9a-f]{64}", str(digest.get("content"))
            ):
                found.append(f"{name}: a hash needs alg and content")
        for licence in item.get("licenses", []):
            named = licence.get("license", {})
            if ("expression" in licence) == bool(named.get("id") or named.get("name")):
                found.append(f"{name}: a licence is an expression, or has a name or an id")
    references = [item.get("bom-ref") for item in everything]
    if len(set(references)) != len(references) or None in references:
        found.append("every component needs a bom-ref of its own")
    for item in bom.get("dependencies", []):
        unknown = {item.get("ref"), *item.get("dependsOn", [])} - {*references}
        found += [f"{name}: is depended on, and not listed" for name in sorted(map(str, unknown))]
    return found


def main() -> None:
    bom = bill([Path(file) for file in sys.argv[1:]], read(LOCK))
    if wrong := problems(bom):
        sys.exit("\n".join(f"error: {line}" for line in wrong))
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
