"""The command line as a user calls it: in a process of its own, or without waiting for one."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

import prefed
from prefed.core.registry import CONTRIB

Done = subprocess.CompletedProcess[str]


def prefed_command(*words: str, cwd: Path | None = None) -> Done:
    command = [sys.executable, "-m", "prefed", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


def prefed_here(*words: str, cwd: Path) -> Done:
    """The same in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    code = exit_code(*words, cwd=cwd, out=out, err=err)
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())


def exit_code(*words: str, cwd: Path, out: IO[str], err: IO[str]) -> int:
    from prefed import cli

    with as_it_was(cwd), redirect_stdout(out), redirect_stderr(err):
        sys.argv = ["prefed", *words]
        try:
            cli.main()
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


REGISTRIES: tuple[Any, ...] = (
    prefed.ALGORITHMS, prefed.DATASETS, prefed.ENGINES, prefed.MODELS, prefed.RULES, prefed.SPLITS,
)  # fmt: skip


@contextmanager
def as_it_was(cwd: Path) -> Iterator[None]:
    """What a command changes in a process is put back."""
    logger, numbers = logging.getLogger("prefed"), (signal.SIGINT, signal.SIGTERM)
    before = os.getcwd(), list(sys.path), list(sys.argv), {*sys.modules}
    handlers, level = list(logger.handlers), logger.level
    signals = {number: signal.getsignal(number) for number in numbers}
    for registry in REGISTRIES:
        registry.names()  # what the package brings is there to stay, and what contrib does
        registry._import_all(CONTRIB)
    things = [dict(registry._things) for registry in REGISTRIES]
    try:
        os.chdir(cwd)
        sys.path.insert(0, str(cwd))
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        os.chdir(before[0])
        sys.path[:], sys.argv[:] = before[1], before[2]
        for name in {*sys.modules} - before[3]:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(cwd)):
                del sys.modules[name]
        logger.handlers[:] = handlers
        logger.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)
        for registry, known in zip(REGISTRIES, things, strict=True):
            registry._things.clear()
            registry._things.update(known)
