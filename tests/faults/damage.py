"""Damaged checkpoints: found by their checksums; the one before is used, with one warning.

With none left the run is refused, and what is on the disk stays as it is: no silent beginning.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import prefed
from prefed.core.errors import RunFailed
from prefed.experiments.checkpoints import CheckpointWarning
from prefed.experiments.config import Config, load
from prefed.experiments.run_directory import execute
from tests.faults.trials import SMALL, checkpoint_every_round, fault, scratch
from tests.helpers.run_folders import fingerprint

FILES = ("state.safetensors", "rounds.jsonl", "manifest.json")


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped after round 5 of 6, with checkpoints of rounds 4 and 5."""

    config: Config
    folder: Path
    expected: str
    other: Path
    """One that differs in its seed alone."""


def stopped(root: Path, *changes: str) -> Stopped:
    checkpoint_every_round()
    config = load("digits-noniid", [*SMALL, "algorithm=scaffold", *changes])
    execute(config, root / "whole")
    for name, seed in (("run", 0), ("other", 1)):
        answers = iter([False] * 4 + [True])
        try:
            execute(config.model_copy(update={"seed": seed}), root / name, stop=answers.__next__)
        except prefed.Interrupted:
            continue
        raise AssertionError("it was not stopped")
    return Stopped(config, root / "run", fingerprint(root / "whole"), root / "other")


Damage = Callable[[Path], Any]
"""What is done to the directory of checkpoints."""


def survives(run: Stopped, damage: Damage, warned: int = 1) -> str:
    """Resume a damaged copy: the expected bits, after one warning."""
    folder = run.folder.with_name("damaged")
    shutil.copytree(run.folder, folder)
    damage(folder / "checkpoints")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            execute(run.config, folder, resume=True)
        told = [str(w.message) for w in seen if w.category is CheckpointWarning]
        if len(told) != warned:
            return f"{len(told)} warnings: {told}"
        return "" if fingerprint(folder) == run.expected else "it ended in other bits"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)


def refused(run: Stopped, damage: Damage) -> str:
    """Resume a copy with nothing sound in it: a clear error, and nothing is touched."""
    folder = run.folder.with_name("damaged")
    shutil.copytree(run.folder, folder)
    damage(folder / "checkpoints")
    before = contents(folder)
    try:
        execute(run.config, folder, resume=True)
        return "it went on from nothing"
    except prefed.PrefedError as error:
        if "no checkpoint can be used" not in str(error):
            return f"not clear: {error}"
        return "" if contents(folder) == before else "it changed what was there"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    bit = int(place * len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@fault("checkpoint cut short", times=200, quick=6, seconds=40)
def truncated(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        run = stopped(root)
        for trial in range(times):
            name, share = FILES[trial % 3], rng.random()
            yield survives(run, lambda c, n=name, s=share: cut(c / "000005" / n, s))  # type: ignore[misc]


@fault("bit of a checkpoint flipped", times=1000, quick=12, seconds=180)
def flipped(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        run = stopped(root)
        for trial in range(times):
            name, place = FILES[trial % 3], rng.random()
            yield survives(run, lambda c, n=name, p=place: flip(c / "000005" / n, p))  # type: ignore[misc]


@fault("bit of kept state on disk flipped", times=200, quick=6, seconds=30)
def kept_flipped(times: int, rng: random.Random) -> Iterator[str]:
    """Nobody trains with it: the run ends and names the file, or it did not need that record."""
    with scratch() as root:
        run = stopped(root, "kept_state=disk", "clients_per_round=12")
        told = 0
        for _ in range(times):
            folder = root / "damaged"
            shutil.copytree(run.folder, folder)
            flip(folder / "kept.records", rng.random())
            try:
                execute(run.config, folder, resume=True)
                yield "" if fingerprint(folder) == run.expected else "it ended in other bits"
            except RunFailed as error:
                told += 1
                yield "" if "kept.records: is damaged" in str(error) else f"not clear: {error}"
            shutil.rmtree(folder)
        if times >= 50 and not 0 < told < times:
            yield f"{told} of {times} were found: this test tests too little"


def swap(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def mistaken(other: Path) -> dict[str, Damage]:
    """Files that are sound, in the wrong place."""
    foreign = other / "checkpoints"
    cases: dict[str, Damage] = {}
    for name in FILES:
        cases[f"{name} of the checkpoint before"] = lambda c, n=name: shutil.copy(  # type: ignore[misc]
            c / "000004" / n, c / "000005" / n
        )
        cases[f"{name} of another run"] = lambda c, n=name: shutil.copy(  # type: ignore[misc]
            foreign / "000005" / n, c / "000005" / n
        )
        cases[f"no {name}"] = lambda c, n=name: (c / "000005" / n).unlink()  # type: ignore[misc]
        cases[f"a directory for {name}"] = partial(_directory, name=name)
    cases["a checkpoint of another run"] = partial(_replace, by=foreign / "000005")
    cases["an empty checkpoint"] = lambda c: (c / "000006").mkdir()
    cases["a checkpoint under another name"] = lambda c: (c / "000005").rename(c / "000007")
    return cases


def _replace(checkpoints: Path, by: Path) -> None:
    shutil.rmtree(checkpoints / "000005")
    shutil.copytree(by, checkpoints / "000005")


def _directory(checkpoints: Path, name: str) -> None:
    (checkpoints / "000005" / name).unlink()
    (checkpoints / "000005" / name).mkdir()


@fault("files swapped, missing or of another run", times=15, quick=15, seconds=5)
def swapped(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        run = stopped(root)
        for name, damage in mistaken(run.other).items():
            problem = survives(run, damage)
            yield problem and f"{name}: {problem}"


@fault("two checkpoints under each other's names", times=1, quick=1, seconds=5)
def exchanged(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        yield refused(stopped(root), lambda c: swap(c / "000004", c / "000005"))


@fault("no sound checkpoint left", times=100, quick=6, seconds=15)
def none_left(times: int, rng: random.Random) -> Iterator[str]:
    def both(checkpoints: Path) -> None:
        for folder in checkpoints.iterdir():
            how = rng.choice([cut, flip])
            how(folder / rng.choice(FILES), rng.random())

    with scratch() as root:
        run = stopped(root)
        yield refused(run, shutil.rmtree)
        for _ in range(times - 1):
            yield refused(run, both)
