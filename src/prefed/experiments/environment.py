"""The machine and the versions that a run was computed with."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from prefed import __version__
from prefed.core.machine import processor


def environment() -> dict[str, Any]:
    """What a result may depend on besides its config."""
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "prefed": __version__,
        "git_revision": git.stdout.strip() or None,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
