"""C programs, compiled for this machine the first time they are needed.

    $XDG_CACHE_HOME/prefed/native/KEY.so

The key is of the program, the compiler and the processor. PREFED_CACHE names another directory than
$XDG_CACHE_HOME/prefed, or is "off": then a program is compiled in each process anew, and so it is
where others could write into the directory, or nobody can.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

from prefed.core.cache_directory import cache_directory

FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SECONDS = 120.0
"""That a compiler may take."""
TELLING = ("model name", "flags", "Features", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo by which processors differ for a compiler."""


class CannotCompile(Exception):
    """Why there is no such program on this machine."""


@cache
def compiler() -> str | None:
    """The C compiler of this machine, if it has one; CC names another."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


@cache
def about(command: str) -> str:
    """What tells this compiler on this processor from others."""
    found = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=SECONDS)
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    told = sorted({line for line in lines if line.startswith(TELLING)})
    return "\n".join([command, found.stdout, platform.machine(), *told])


_made: dict[tuple[str, str], ctypes.CDLL] = {}
_lock = threading.Lock()


def compiled(source: str, *flags: str) -> ctypes.CDLL:
    """The program as a library of functions."""
    key = " ".join(flags), source
    with _lock:  # workers ask for the same one
        if key not in _made:
            _made[key] = compile_anew(source, *flags)
        return _made[key]


def compile_anew(source: str, *flags: str) -> ctypes.CDLL:
    """From the cache, or by the compiler."""
    if (command := compiler()) is None:
        raise CannotCompile("no C compiler (cc, gcc or clang) is installed")
    try:
        words = "\0".join([source, *FLAGS, *flags, about(command)])
        key = hashlib.sha256(words.encode()).hexdigest()[:32]
        if (folder := cache_directory()) is not None:
            with suppress(OSError):
                return _kept([command, *flags], source, folder / "native", key)
        with tempfile.TemporaryDirectory() as draft:
            return ctypes.CDLL(str(_compile([command, *flags], source, Path(draft))))
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"{command}: {error}") from error


def _kept(command: list[str], source: str, folder: Path, key: str) -> ctypes.CDLL:
    """The library in a directory of the user's own; OSError if there can be none."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for place in (folder, folder.parent):
        _check_private(place)
    library = folder / f"{key}.so"
    with suppress(OSError):  # there is none, or what was written is not whole
        return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        os.replace(_compile(command, source, Path(draft)), library)
    return ctypes.CDLL(str(library))


def _check_private(folder: Path) -> None:
    """Nobody else can put a file there, or another directory in its place: what lies there is
    run."""
    found = folder.lstat()
    others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.getuid(), 0) or others:
        raise PermissionError(f"{folder} is not private")


def _compile(command: list[str], source: str, folder: Path) -> Path:
    program, library = folder / "program.c", folder / "program.so"
    program.write_text(source)
    for own in (["-march=native"], ["-mcpu=native"], []):  # not every compiler knows the first
        line = [*command, *FLAGS, *own, str(program), "-o", str(library), "-lm"]
        found = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
        if found.returncode == 0:
            return library
    told = [line for line in found.stderr.splitlines() if "error" in line] or ["it failed"]
    raise CannotCompile(f"{command[0]}: {told[0]}")


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """As such a program takes it."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
