"""C programs, compiled for this machine the first time they are needed.

    $XDG_CACHE_HOME/prefed/native/KEY.so

The key is of the program, the compiler and the processor. PREFED_CACHE names another directory than
$XDG_CACHE_HOME/prefed, or is "off": then a program is compiled in each process anew.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from prefed.core.cache_directory import cache_directory
from prefed.core.machine import processor

FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SECONDS = 120.0
"""That a compiler may take."""


class CannotCompile(Exception):
    """Why there is no such program on this machine."""


@cache
def compiler() -> str | None:
    """The C compiler of this machine, if it has one; CC names another."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


@cache
def _about(command: str) -> str:
    """What tells this compiler on this processor from others."""
    found = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=SECONDS)
    return f"{command} {found.stdout} {processor()}"


@cache
def compiled(source: str) -> ctypes.CDLL:
    """The program as a library of functions."""
    command = compiler()
    if command is None:
        raise CannotCompile("no C compiler (cc, gcc or clang) is installed")
    key = hashlib.sha256("\0".join([source, *FLAGS, _about(command)]).encode()).hexdigest()[:32]
    folder = cache_directory()
    try:
        if folder is not None:
            library = _private(folder / "native") / f"{key}.so"
            if not library.exists():
                with tempfile.TemporaryDirectory(dir=library.parent) as draft:
                    os.replace(_compile(command, source, Path(draft)), library)
            return ctypes.CDLL(str(library))
        with tempfile.TemporaryDirectory() as draft:
            return ctypes.CDLL(str(_compile(command, source, Path(draft))))
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"{command}: {error}") from error


def _private(folder: Path) -> Path:
    """A directory whose files nobody else can have written: what lies there is run."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise CannotCompile(f"{folder}: others may write there; make it private with chmod 700")
    return folder


def _compile(command: str, source: str, folder: Path) -> Path:
    program, library = folder / "program.c", folder / "program.so"
    program.write_text(source)
    for own in (["-march=native"], ["-mcpu=native"], []):  # not every compiler knows the first
        line = [command, *FLAGS, *own, str(program), "-o", str(library), "-lm"]
        found = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
        if found.returncode == 0:
            return library
    told = [line for line in found.stderr.splitlines() if "error" in line] or ["it failed"]
    raise CannotCompile(f"{command}: {told[0]}")
