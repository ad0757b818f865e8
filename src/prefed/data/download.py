"""Downloading data sets: resumed where it broke off, verified, unpacked with nothing outside."""

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from prefed.core.errors import PrefedError
from prefed.data.reading import BOMB
from prefed.data.sources import File, Source

Progress = Callable[[str, int, int | None], None]
"""(file name, bytes so far, bytes in all or None)"""
ATTEMPTS = 5
CHUNK = 1 << 16
TIMEOUT = 30.0


def get(source: Source, root: Path, progress: Progress = lambda name, done, total: None) -> Path:
    """Fetch all files of a data set into its folder inside `root`; the folder."""
    folder = root / source.folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        target = folder / file.name
        if not (target.is_file() and _sum_is_right(target, file.checksum)):
            _fetch(file, target, progress)
        if file.unpack:
            unpack(target, folder)
            target.unlink()
    return folder


def _fetch(file: File, target: Path, progress: Progress) -> None:
    """Download to NAME.part, going on from what is there, and rename it once it is right."""
    part = target.with_name(target.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            before = part.stat().st_size if part.exists() else 0
            if _transfer(file, part, progress):
                break
            stuck = part.stat().st_size <= before
        except urllib.error.HTTPError as error:
            text = f"the server answers {error.code} {error.reason}"
            raise _by_hand(file, target, text) from None
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                raise _by_hand(file, target, str(getattr(error, "reason", error))) from None
            stuck = False
        if attempt == ATTEMPTS or stuck:
            text = f"the connection broke off {attempt} times; run it again to go on from there"
            raise _by_hand(file, target, text)
    if not _sum_is_right(part, file.checksum):
        found = _sum(part, file.checksum or "")
        part.unlink()
        text = f"what was downloaded has the checksum {found}, published is {file.checksum}"
        raise PrefedError(f"{file.url}: {text}; it was deleted, try again")
    os.replace(part, target)


def _transfer(file: File, part: Path, progress: Progress) -> bool:
    """One connection; whether the file is whole after it."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "prefed"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after what we have; the checksum will tell
            return True
        raise
    with response:
        place = str(response.headers.get("Content-Range", ""))
        resumed = response.status == 206 and place.startswith(f"bytes {have}-")
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        with open(part, "ab" if resumed else "wb") as out:
            while chunk := response.read(CHUNK):
                out.write(chunk)
                have += len(chunk)
                progress(file.name, have, total)
    return total is None or have == total


def _sum(path: Path, checksum: str) -> str:
    kind = checksum.partition(":")[0] or "sha256"
    with open(path, "rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _sum_is_right(path: Path, checksum: str | None) -> bool:
    return checksum is None or _sum(path, checksum) == checksum


def _by_hand(file: File, target: Path, problem: str) -> PrefedError:
    what = "unpack it into" if file.unpack else "put it into"
    return PrefedError(
        f"{file.url}: {problem}. Behind a proxy set https_proxy and http_proxy; without a network "
        f"fetch this address elsewhere and {what} {target.parent}"
    )


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz or .zip, all of it or nothing. Only files and folders, with relative names
    that stay inside, and not more than an honest archive holds."""
    most = BOMB * archive.stat().st_size
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as temporary:
        inside = Path(temporary)
        try:
            for name, size, source in _members(archive):
                target = inside / _safe(archive, name)
                most -= size
                if most < 0:
                    text = f"it holds more than {BOMB} times its size"
                    raise PrefedError(f"{archive}: {name}: {text}")
                target.parent.mkdir(parents=True, exist_ok=True)
                with source, open(target, "wb") as out:
                    shutil.copyfileobj(source, out)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            raise PrefedError(f"{archive}: cannot be unpacked: {error}") from None
        for path in sorted(inside.rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(inside)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)


def _members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if info.external_attr >> 28 == 0xA:
                    raise PrefedError(f"{archive}: {info.filename}: a link, which is not unpacked")
                if not info.is_dir():
                    yield info.filename, info.file_size, opened.open(info)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.isfile() and not member.isdir():
                raise PrefedError(f"{archive}: {member.name}: a link or device, not unpacked")
            if member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                yield member.name, member.size, content


def _safe(archive: Path, name: str) -> Path:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or ".." in parts or parts[0].startswith("/") or ":" in parts[0] or "\0" in name:
        raise PrefedError(f"{archive}: {name}: a name outside the target; nothing was unpacked")
    return Path(*parts)
