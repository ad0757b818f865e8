"""What the studies share: what they hand back, how it is saved, and the table of the constants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.safe_files import to_json, write_whole
from prefed.experiments.config import Config
from prefed.experiments.environment import environment
from prefed.report.sections import Section, Table, write_sections
from prefed.theory.constants import Constants
from prefed.theory.objective import Tick
from prefed.training.run import Run

WARM_UP = 10
"""Rounds of the config's own run, to have points on its way."""


@dataclass
class Found:
    config: Config
    sections: list[Section]
    numbers: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    title: str
    pieces: Callable[[Config], int]
    """How often `run` will tick."""
    run: Callable[[str, Sequence[str], Tick], Found]


def own_rounds(run: Run, rounds: int, tick: Tick) -> None:
    for _ in run.rounds(until=run.server.round + rounds):
        tick("the config's own run")


def constants_table(found: Constants) -> Table:
    estimates = {
        "L, smoothness of every F_i": found.L,
        "G, largest coordinate of a gradient": found.G,
        "σ_l², mean over clients": found.local,
        "σ_l², largest client": found.local_largest,
        "σ_g²": found.spread,
        "F(w0) - F*": found.gap,
    }
    return Table(
        ("constant", "estimate", "interval", "how"),
        [
            (name, f"{e.value:.4g}", f"{e.low:.4g} to {e.high:.4g}", e.how)
            for name, e in estimates.items()
        ],
    )


def prepare(folder: Path) -> Path:
    """An empty directory of that name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PrefedError(f"{folder}: is not empty; choose another directory")
    except OSError as error:
        raise PrefedError(f"{folder}: cannot be written: {error}") from None
    return folder


def save(folder: Path, title: str, found: Found) -> Path:
    """numbers.json, coordinates.safetensors if there are any, and the report."""
    about = environment()
    text = to_json({**found.numbers, "environment": about}, indent=2)
    write_whole(folder / "numbers.json", text + "\n")
    if found.tensors:
        contents = {name: value.contiguous() for name, value in found.tensors.items()}
        write_whole(folder / "coordinates.safetensors", safetensors.torch.save(contents))
    config = tomli_w.dumps(found.config.to_dict())
    write_whole(folder / "theory.toml", config)
    write_sections(folder / "report.html", title, found.sections, config, about)
    return folder / "report.html"
