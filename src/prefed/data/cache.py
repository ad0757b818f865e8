"""Decoded data sets on disk: read once from their official files, then mapped into memory.

    $XDG_CACHE_HOME/prefed/NAME-KEY.safetensors

The key is of the paths of the official files and of the options of the decoder. Inside stands which
versions of the files it was made from, by size and time of change: where these are others, the
files are decoded anew and the cache is replaced. Processes that read the same data set share its
memory. PREFED_CACHE names another directory, or is "off".
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from prefed.core.cache_directory import cache_directory
from prefed.core.tensor_files import write_tensors

log = logging.getLogger("prefed")

VERSION = 1
"""Of all decoders: to be raised when one of them decodes otherwise."""
SMALL = 1 << 20
"""Files with fewer bytes in all are decoded each time."""
SETTLED = 2.0
"""Seconds: a file that was changed more recently may change again with no other time."""

Form = Mapping[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]
"""Of each array, the types it may have and the shape of a sample."""
Arrays = dict[str, Tensor]


OLD = 3600.0
"""Seconds after which nobody writes a file any more."""


def decoded(
    name: str, files: Sequence[Path], options: object, form: Form, decode: Callable[[], Arrays]
) -> Arrays:
    """What `decode` makes of the files with these options, or made of them earlier."""
    folder, versions = cache_directory(), _versions(files)
    if folder is None or versions is None:
        return decode()
    paths = [str(path.resolve()) for path in files]
    key = hashlib.sha256(json.dumps([VERSION, paths, options]).encode()).hexdigest()[:16]
    path = folder / f"{name}-{key}.safetensors"
    if (known := _read(path, versions, form)) is not None:
        return known
    found = decode()
    if _versions(files) == versions:
        try:
            _write(path, versions, found)
        except OSError as error:
            log.info("%s: cannot be written: %s", path, error.strerror or error)
        found = _read(path, versions, form) or found  # so that its memory is shared
    return found


def _versions(files: Sequence[Path]) -> str | None:
    """Size and time of change of each file; None if they are not worth keeping, or not settled."""
    try:
        about = [path.stat() for path in files]
    except OSError:
        return None
    if sum(file.st_size for file in about) < SMALL:
        return None
    if time.time() - max(file.st_mtime for file in about) < SETTLED:
        return None
    return json.dumps([[file.st_size, file.st_mtime_ns] for file in about])


def _read(path: Path, versions: str, form: Form) -> Arrays | None:
    """What is in the cache, if it is of these versions and has this form."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("versions") != versions or {*file.keys()} != {*form}:
                return None
            found = {name: file.get_tensor(name) for name in form}
    except (OSError, safetensors.SafetensorError):
        return None
    for name, (types, shape) in form.items():
        value = found[name]
        if value.dtype not in types or value.dim() == 0 or value.shape[1:] != shape:
            return None
    return found


def _write(path: Path, versions: str, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # by a process that was killed
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD:
                left.unlink()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        write_tensors(Path(temporary), arrays, {"versions": versions})
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
