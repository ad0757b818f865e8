"""Runs that blow up: they stop and say what to lower, or go on without the clients that did."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
from torch import Tensor

from tests.faults.trials import checkpoint_every_round, command, fault, scratch, start

NAMES = ("fedavg", "fedadam", "prefed", "scaffold", "fedprox")


def newest(folder: Path) -> tuple[int, dict[str, Tensor]]:
    path = max((folder / "checkpoints").iterdir())
    return int(path.name), safetensors.torch.load_file(path / "state.safetensors")


def is_finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in tensors.values())


def explodes(rng: random.Random, power: float, more: float = 3) -> str:
    """A step size that is right for three rounds, and then far too large."""
    decay = 10.0 ** (power + rng.uniform(0, more))
    return f'{{schedule = "step", start = 0.01, decay = {decay:g}, every = 3}}'


@fault("step size far too large: stop", times=40, quick=4, seconds=20)
def stop(times: int, rng: random.Random) -> Iterator[str]:
    """On the clients or, every other time, on the server; with a checkpoint after every round or
    hardly any. The server's own step overflows in place: then a checkpoint is what is left."""
    with scratch() as root:
        for trial in range(times):
            server, often = trial % 2 == 1, trial % 4 > 1
            name = NAMES[trial // 2 % len(NAMES)]
            changes: tuple[str, ...] = (
                f"algorithm={name}",
                f"client_lr={explodes(rng, 35 + trial % 8)}",
            )
            if server:
                rate = f"server_lr={explodes(rng, 39.9, 0.5)}"
                changes = ("algorithm=fedavg", "client_lr=30", rate)
            changes = (*changes, f"seed={trial}")
            before = checkpoint_every_round if often else lambda: None
            child = start(command(root / "run", *changes), root / "log", before)
            code, text = child.wait(), child.text()
            told = re.search(r"diverged: round (\d+): .* Lower client_lr \(now", text)
            lower = "or server_lr (now" in text if server else True
            if code != 1 or not told or not lower or "Traceback" in text:
                yield f"{changes}: exit {code}, {text[-400:]}"
            else:
                round, tensors = newest(root / "run")
                exact = round == int(told[1]) - 1 or (server and not often)
                late = int(told[1]) > 3
                fine = is_finite(tensors) and exact and late
                yield "" if fine else f"{changes}: checkpoint of round {round}, {told[0]}"
            shutil.rmtree(root / "run")


@fault("step size far too large: continue", times=20, quick=2, seconds=10)
def go_on(times: int, rng: random.Random) -> Iterator[str]:
    checkpoint_every_round()
    with scratch() as root:
        for trial in range(times):
            name = NAMES[trial % len(NAMES)]
            rate = 10.0 ** rng.uniform(30, 37)
            changes = (f"algorithm={name}", f"client_lr={rate:g}", "on_divergence=continue")
            child = start(command(root / "run", *changes), root / "log")
            code, text = child.wait(), child.text()
            said = re.search(r"round 1: client \d+ is left out: its update is not finite", text)
            final = root / "run" / "model.safetensors"
            if code or not said or not final.exists():
                yield f"{changes}: exit {code}, {text[-400:]}"
            else:
                sound = is_finite(safetensors.torch.load_file(final))
                yield "" if sound else f"{changes}: the model is not finite"
            shutil.rmtree(root / "run")
