"""Files that appear whole or not at all, and directories that one process has to itself."""

import errno
import fcntl
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from prefed.core.errors import PrefedError


def write_whole(path: Path, content: bytes | str) -> None:
    """Write to a temporary file beside it, flush it to the disk, and rename."""
    data = content.encode() if isinstance(content, str) else content
    try:
        _write_whole(path, data)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary one
        raise


def _write_whole(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON has no infinity: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_whole(path: Path) -> bytes:
    """What is in a file. A pipe would wait for ever and a device never end: they are refused."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return path.read_bytes()


def sync(folder: Path) -> None:
    """Make renames in a directory last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Temporary files of a process that was killed while writing."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def lock(folder: Path) -> IO[str]:
    """Hold the directory until the returned file is closed or the process ends, however it ends."""
    file = open(folder / ".lock", "w")  # noqa: SIM115
    for wait in (0.02, 0.2, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if wait is not None:
                time.sleep(wait)  # it may be `is_locked` elsewhere, which lasts for an instant
    file.close()
    raise PrefedError(f"{folder}: another process is running there")


def is_locked(folder: Path) -> bool:
    path = folder / ".lock"
    if not path.exists():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
