"""What is installed, known about and shipped: the lock, the audit from a file, the release."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.helpers import ROOT

SCRIPTS = ROOT / "scripts"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def module(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def test_the_lock_pins_all_that_tests_and_documentation_need() -> None:
    lock, bill = module("lock"), module("sbom")
    pinned = lock["read"](lock["LOCK"])
    text = lock["LOCK"].read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("#", " "))]
    assert len(lines) == len(pinned)
    assert all(hashes for _, hashes in pinned.values())
    assert "://" not in text
    needed = bill["closure"]("prefed", ["", "test", "docs"])
    assert len(needed) > 150
    left_out = {name for name in needed if lock["is_left_out"](name)}
    assert {"torch", "prefed"} <= left_out
    assert set(needed) - left_out <= set(pinned)
    constraints = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    for name, version in constraints:
        if (name := lock["canonical"](name)) != "torch":
            assert pinned[name][0] == version, f"{name}: run scripts/lock.py"


def test_another_platform_adds_hashes_and_another_version_replaces_them() -> None:
    merged = module("lock")["merged"]
    old = {"a": ("1", {"x"}), "b": ("1", {"x"}), "only-there": ("3", {"z"})}

    def found(name: str, version: str, digest: str) -> dict[str, Any]:
        about = {"archive_info": {"hashes": {"sha256": digest}}}
        return {"metadata": {"name": name, "version": version}, "download_info": about}

    items = [found("A", "1", "y"), found("b", "2", "y"), found("torch", "2", "y")]
    assert merged(old, {"install": items}) == {
        "a": ("1", {"x", "y"}), "b": ("2", {"y"}), "only-there": ("3", {"z"}),
    }  # fmt: skip
    items[0]["download_info"] = {"dir_info": {}}
    with pytest.raises(SystemExit, match="no SHA-256 for a"):
        merged(old, {"install": items})


HERE = numpy.__version__


def advisory(**more: Any) -> dict[str, Any]:
    affected = {"package": {"name": "NumPy", "ecosystem": "PyPI"}, **more}
    return {"id": "GHSA-x", "affected": [affected]}


def between(*events: tuple[str, str]) -> dict[str, Any]:
    return {"ranges": [{"type": "ECOSYSTEM", "events": [{k: v} for k, v in events]}]}


@pytest.mark.parametrize(("more", "is_hit"), [
    ({"versions": [HERE]}, True),
    ({"versions": ["0.1"]}, False),
    (between(("introduced", "0")), True),
    (between(("introduced", "0"), ("fixed", HERE)), False),
    (between(("introduced", "0"), ("fixed", "9999")), True),
    (between(("introduced", "0"), ("last_affected", HERE)), True),
    (between(("introduced", "0"), ("last_affected", "0.9")), False),
    (between(("introduced", "0"), ("fixed", "0.5"), ("introduced", "1.0")), True),
    (between(("introduced", "1.0"), ("introduced", "0"), ("fixed", "0.5")), True),
    (between(("introduced", "9999")), False),
    ({"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, False),
    (between(("introduced", "not a version")), True),
])  # fmt: skip
def test_which_versions_an_advisory_is_about(more: dict[str, Any], is_hit: bool) -> None:
    affected = advisory(**more)["affected"][0]
    assert module("advisories")["is_affected"](HERE, affected) == is_hit


def audit(database: Path) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPTS / "audit.py"), "--database", str(database)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.process
def test_an_audit_from_a_file(tmp_path: Path) -> None:
    bad, good = advisory(versions=[HERE]), advisory(versions=["0.1"])
    (single := tmp_path / "one.json").write_text(json.dumps(bad))
    (several := tmp_path / "list.json").write_text(json.dumps([good, bad]))
    with zipfile.ZipFile(packed := tmp_path / "all.zip", "w") as archive:
        archive.writestr("GHSA-x.json", json.dumps(bad))
    (folder := tmp_path / "folder").mkdir()
    (folder / "GHSA-x.json").write_text(json.dumps(bad))
    for path in (single, several, packed, folder):
        code, text = audit(path)
        assert code == 1, text
        assert f"numpy {HERE}: GHSA-x\n" in text
    single.write_text(json.dumps({**bad, "withdrawn": "2020-01-01T00:00:00Z"}))
    assert audit(single)[0] == 0
    several.write_text(json.dumps([good]))
    code, text = audit(several)
    assert code == 0
    assert "audited against 1 entries" in text


@pytest.mark.process
@pytest.mark.parametrize("what", ["nothing", "nonsense", "other JSON", "an empty list", "no file"])
def test_a_file_that_says_nothing_is_no_audit(what: str, tmp_path: Path) -> None:
    texts = {"nothing": "", "nonsense": "{", "other JSON": "{}", "an empty list": "[]"}
    path = tmp_path / "database.json"
    if what in texts:
        path.write_text(texts[what])
    code, text = audit(path)
    assert code == 2
    assert text.startswith("dependencies: not audited")


def test_what_pip_audit_has_found_elsewhere(tmp_path: Path) -> None:
    names = module("advisories")
    found = [
        {"name": "NumPy", "version": HERE, "vulns": [{"id": "PYSEC-1"}]},
        {"name": "torch", "version": "2.13.0+cpu", "vulns": []},
    ]
    (path := tmp_path / "pip-audit.json").write_text(json.dumps({"dependencies": found}))
    installed = {"numpy": HERE, "torch": "2.13.0"}
    assert names["known_holes"](path, installed) == ([["PYSEC-1"], []], 2)
    with pytest.raises(names["BadDatabase"], match="made without torch in this version"):
        names["known_holes"](path, {**installed, "torch": "2.14.0"})


@pytest.mark.process
def test_a_release(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=False).returncode:
        pytest.skip("not a repository: there is no commit to release")
    command = [sys.executable, str(SCRIPTS / "release.py"), "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "dist").iterdir()}
    (wheel,) = (name for name in names if name.endswith(".whl"))
    (sdist,) = (name for name in names if name.endswith(".tar.gz"))
    (bom,) = (name for name in names if name.endswith(".cdx.json"))
    assert names == {wheel, sdist, bom, "SHA256SUMS"}
    for line in (tmp_path / "dist" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((tmp_path / "dist" / name).read_bytes()).hexdigest() == digest
    bill = json.loads((tmp_path / "dist" / bom).read_text())
    shipped = {c["name"]: c["scope"] for c in bill["components"]}
    assert shipped["torch"] == shipped["numpy"] == "required"
    assert shipped["flwr"] == "optional"
    assert not {"pytest", "sphinx", "prefed"} & set(shipped)
    files = {r["url"] for r in bill["metadata"]["component"]["externalReferences"]}
    assert files == {wheel, sdist}
    check_problems(bill)


def check_problems(bill: dict[str, Any]) -> None:
    """What the specification demands is noticed when it is missing."""
    problems = module("sbom")["problems"]
    assert problems(bill) == []
    for path, value in [
        (("bomFormat",), "SPDX"), (("specVersion",), "0"), (("version",), 0),
        (("serialNumber",), "1"), (("components", 0, "name"), ""),
        (("components", 0, "type"), "book"), (("components", 0, "bom-ref"), "pkg:pypi/other@1"),
        (("components", 0, "licenses"), [{}]), (("components", 0, "hashes"), [{"alg": "MD5"}]),
        (("components", 1, "bom-ref"), bill["components"][0]["bom-ref"]),
        (("dependencies", 0, "dependsOn"), ["pkg:pypi/unknown@1"]),
        (("metadata", "component", "name"), None),
    ]:  # fmt: skip
        changed = copy.deepcopy(bill)
        place: Any = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert problems(changed), path
