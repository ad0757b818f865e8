"""Where data files are, and reading them without trusting them."""

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import IO

from prefed.core.errors import PrefedError

VARIABLE = "PREFED_DATA"
BOMB = 64
"""A compressed file that grows more than this many times is refused. Images in the official
files shrink to a fifth at best, text to a tenth."""
SMALL = 1 << 20
"""Files with fewer bytes are never refused for that."""


def root(path: str | None) -> Path:
    """The directory data sets are looked for in: the option, the environment, or ./data."""
    return Path(path or os.environ.get(VARIABLE) or "data").expanduser()


class Missing(PrefedError):
    """Nothing of a data set is there."""


def missing(name: str, wanted: str, folder: Path) -> Missing:
    from prefed.data.sources import SOURCES

    where = f"data.path, or the environment variable {VARIABLE}, says where the files are"
    text = f"{folder}: no {wanted} for the data set {name!r} there; {where}"
    if name in SOURCES:
        text += f". `prefed data get {name}` would download it from {SOURCES[name].page}"
    return Missing(text)


def find(name: str, folder: Path, candidates: list[str]) -> Path:
    """The first of the candidates that exists, in the folder, in its folder for this data set, or
    where a package puts it."""
    from prefed.data.sources import SOURCES

    packaged = SOURCES[name].places if name in SOURCES else ()
    near = [base / place for place in packaged for base in (folder, Path())]
    for place in (folder, folder / name, *near):
        for candidate in candidates:
            if (place / candidate).is_file():
                return place / candidate
    raise missing(name, " or ".join(dict.fromkeys(candidates)), folder)


def wrong(path: Path, offset: int, text: str) -> PrefedError:
    """The error for a damaged file, with the place of the damage."""
    return PrefedError(f"{path}: byte {offset}: {text}")


def read_exactly(path: Path, file: IO[bytes], offset: int, buffer: memoryview) -> None:
    """Fill the buffer, or say where the file ended."""
    done = 0
    while done < len(buffer):
        part = guarded(path, offset + done, file, min(1 << 20, len(buffer) - done))
        if not part:
            text = f"the file ends here, {len(buffer) - done} bytes too early"
            raise wrong(path, offset + done, text)
        buffer[done : done + len(part)] = part
        done += len(part)


def read_end(path: Path, file: IO[bytes], offset: int) -> None:
    """Nothing may follow. For a gzip file this also checks its checksum."""
    if guarded(path, offset, file, 1):
        raise wrong(path, offset, "the data should end here, but the file goes on")


def guarded(path: Path, offset: int, file: IO[bytes], size: int) -> bytes:
    """Read, with the errors of a damaged gzip file put into words."""
    try:
        return file.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        raise wrong(path, offset, f"cannot be read on from here: {error}") from None


def open_plain_or_gzip(path: Path) -> IO[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error}") from None
    if not compressed:
        if path.suffix == ".gz":
            file.close()
            raise wrong(path, 0, "not a gzip file, though its name ends in .gz")
        return file
    return _Gzip(file)


class _Gzip(io.BufferedReader):
    """A gzip file that closes the file under it as well."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        super().__init__(gzip.GzipFile(fileobj=file, mode="rb"))

    def close(self) -> None:
        super().close()
        self.file.close()


def refuse_bomb(path: Path, offset: int, size: int) -> None:
    """Raise if `size` bytes cannot honestly come out of this file. Before anything is allocated."""
    stored = path.stat().st_size
    if size > SMALL and size > BOMB * stored:
        text = f"it claims to hold {size} bytes, more than {BOMB} times the file's own {stored}"
        raise wrong(path, offset, text)
