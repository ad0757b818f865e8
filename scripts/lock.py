"""Pin what `make LOCKED=1` installs, by version and SHA-256, in requirements.lock.

    python scripts/lock.py                  asks pip what it would install here
    python scripts/lock.py --report FILE    takes a report that pip has made already

A platform adds the hashes of its own files: run it on each that the lock is for. What has another
version than before loses its old hashes. torch is not in the lock, nor what its CUDA builds bring:
one version of it comes in several builds, and which one is right depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = """\
# Made by scripts/lock.py: what `make LOCKED=1` installs. torch is pinned in constraints.txt alone.
"""
Lock = dict[str, tuple[str, set[str]]]
"""Version and hashes by name."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def is_left_out(name: str) -> bool:
    return name in ("torch", "prefed", "triton") or name.startswith(("nvidia-", "cuda-"))


def read(path: Path) -> Lock:
    found: Lock = {}
    text = path.read_text() if path.exists() else ""
    for name, version, hashes in re.findall(r"^([\w.-]+)==(\S+)((?: \\\n    \S+)+)", text, re.M):
        found[name] = version, set(re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes))
    return found


def write(path: Path, lock: Lock) -> None:
    lines = [HEAD]
    for name in sorted(lock):
        version, hashes = lock[name]
        lines.append(" \\\n    ".join(
            [f"{name}=={version}", *(f"--hash=sha256:{h}" for h in sorted(hashes))]
        ) + "\n")  # fmt: skip
    path.write_text("".join(lines))


def merged(old: Lock, report: dict[str, list[dict[str, dict[str, object]]]]) -> Lock:
    """The lock with what pip reports in the place of what was there."""
    new: Lock = {}
    for item in report["install"]:
        name, version = canonical(str(item["metadata"]["name"])), str(item["metadata"]["version"])
        if is_left_out(name):
            continue
        archive = item["download_info"].get("archive_info")
        if not isinstance(archive, dict) or "sha256" not in archive.get("hashes", {}):
            sys.exit(f"error: pip reports no SHA-256 for {name}; ask an index that has them")
        before, hashes = old.get(name, ("", set()))
        new[name] = (
            version,
            {archive["hashes"]["sha256"]} | (hashes if before == version else set()),
        )
    # What another platform needs besides is still pinned, if nothing here speaks against it.
    return {**{name: pin for name, pin in old.items() if name not in new}, **new}


def report_of_pip() -> Path:
    path = Path(tempfile.mkstemp(suffix=".json")[1])
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", str(path), "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*command, f"{ROOT}[test,docs]"], check=True, cwd=ROOT)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path)
    parser.add_argument("--lock", type=Path, default=LOCK)
    options = parser.parse_args()
    report = json.loads((options.report or report_of_pip()).read_text())
    lock = merged(read(options.lock), report)
    write(options.lock, lock)
    print(f"{options.lock}: {len(lock)} packages, {sum(len(h) for _, h in lock.values())} hashes")


if __name__ == "__main__":
    main()
