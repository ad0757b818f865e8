"""Small runs on disk, stopped where a test wants it, and the bits in which they end."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import prefed
from prefed.experiments.config import Config, load
from prefed.experiments.run_directory import execute

SMALL = ["rounds=5", "local_steps=2", "model.hidden=[8]", "clients_per_round=3", "device=cpu"]


def small(name: str, *more: str) -> Any:
    return load("digits-noniid", [*SMALL, f"algorithm={name}", *more])


class StopAfter:
    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def fingerprint(folder: Path) -> str:
    """Of the final weights and of the history, times aside."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = json.dumps([{**line, "seconds": 0} for line in lines])
    weights = (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + rounds.encode()).hexdigest()


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob(".*") if p.name != ".lock"]


def whole_and_resumed(config: Config, folder: Path) -> tuple[prefed.Result, prefed.Result]:
    """A run from its first round to its last, and the same stopped after two and resumed."""
    whole = execute(config, folder / "whole")
    with pytest.raises(prefed.Interrupted):
        execute(config, folder / "cut", stop=StopAfter(2))
    return whole, execute(config, folder / "cut", resume=True)
