"""The command line as a user calls it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def prefed_command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefed", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )
