"""A run on disk: config, environment, a line per round, the final model."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import tomli_w
import torch

from prefed import __version__
from prefed.config import Config
from prefed.errors import Diverged, PrefedError
from prefed.files import write_whole
from prefed.simulation import Record, Result, Simulation

OnRound = Callable[[Record], None]


def execute(config: Config, folder: Path | None, on_round: OnRound = lambda record: None) -> Result:
    """Run a config to its end, writing it into `folder` unless that is None."""
    simulation = config.make_simulation()
    directory = None if folder is None else RunDirectory(folder, config)
    while simulation.server.round < config.rounds:
        try:
            record = simulation.run_round()
        except Diverged:
            if directory:
                directory.append(simulation.history[-1])
            raise
        if directory:
            directory.append(record)
        on_round(record)
    result = simulation.result()
    if directory:
        directory.save_model(simulation)
    return result


class RunDirectory:
    def __init__(self, folder: Path, config: Config) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PrefedError(f"--out {folder}: exists and is not empty; choose another directory")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        write_whole(folder / "config.toml", tomli_w.dumps(config.to_dict()))
        write_whole(folder / "environment.json", json.dumps(environment(), indent=2) + "\n")

    def append(self, record: Record) -> None:
        with open(self.folder / "rounds.jsonl", "a") as file:
            file.write(to_json(record) + "\n")

    def save_model(self, simulation: Simulation) -> None:
        """The final weights under the model's own names, buffers and frozen parameters too."""
        tensors = simulation.task.flat.module.state_dict()
        plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        write_whole(self.folder / "model.safetensors", safetensors.torch.save(plain))


def to_json(record: Record) -> str:
    """One line of JSON; numbers that are not finite, which JSON does not have, become null."""
    return json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
