"""Build a release from the last commit: sdist, wheel, bill of materials, checksums. No upload.

    python scripts/release.py [--out dist]

Only what is committed goes in: the sdist is made from an export of the commit, and the wheel from
the sdist. Nothing is downloaded: the setuptools of this environment builds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).rstrip("\n")


def build(what: str, source: Path, out: Path) -> None:
    """By setuptools, as pip would ask it to; it talks much."""
    command = [sys.executable, "-c", BUILD, what, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {what} failed\n{done.stdout}{done.stderr}")


def release(out: Path) -> list[Path]:
    os.environ["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        print(f"not committed, and left out:\n{changed}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        archive = Path(scratch) / "commit.tar"
        git("archive", "--output", str(archive), "HEAD")
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        build("build_sdist", source, out)
        (sdist,) = out.glob("*.tar.gz")
        with tarfile.open(sdist) as tar:
            tar.extractall(scratch, filter="data")
        build("build_wheel", Path(scratch) / sdist.name.removesuffix(".tar.gz"), out)
    (wheel,) = out.glob("*.whl")
    check_wheel(wheel)
    bom = out / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
    command = [sys.executable, str(ROOT / "scripts" / "sbom.py"), str(wheel), str(sdist)]
    bom.write_text(subprocess.check_output(command, text=True))
    made = [sdist, wheel, bom]
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in made]
    (out / "SHA256SUMS").write_text("".join(sums))
    return [*made, out / "SHA256SUMS"]


def check_wheel(wheel: Path) -> None:
    """Every file of the package is in it, and nothing else is but its metadata."""
    kept = git("ls-tree", "-r", "--name-only", "HEAD", "src/prefed").splitlines()
    wanted = {name.removeprefix("src/") for name in kept}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != wanted:
        sys.exit(f"error: missing in the wheel {sorted(wanted - found)}, "
                 f"too much {sorted(found - wanted)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    for file in release(parser.parse_args().out.absolute()):
        print(file)


if __name__ == "__main__":
    main()
