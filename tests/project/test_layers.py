"""The layers of the package, and the walk through it that the tour shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import prefed
from prefed.cli import app
from tests.helpers import ROOT

SOURCES = ROOT / "src" / "prefed"
WATCH = SOURCES / "core" / "parts.py"
"""Stands around functions to tell how long they take, and is no step of the walk."""


@pytest.mark.process
def test_layers_import_only_what_is_below_them() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_picture_in_the_tour_has_every_package() -> None:
    picture = (ROOT / "docs" / "tour.md").read_text().partition("```text")[2].partition("```")[0]
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert packages <= set(re.findall(r"\w+", picture))


def test_no_two_modules_have_the_same_name() -> None:
    """But for the apps that `prefed deploy --write` copies, and files that Python wants so."""
    found = [p for p in SOURCES.rglob("*.py") if p.parent.name != "app"]
    names = Counter(p.stem for p in found if not p.stem.startswith("__"))
    twice = {name for name, count in names.items() if count > 1}
    assert not twice


def walk() -> list[str]:
    """The modules that the tour names, in its order."""
    text = (ROOT / "docs" / "tour.md").read_text().partition("<!-- the walk")[2].partition("## ")[0]
    return re.findall(r"^\s*(?:\d+\.|-|  -) `([\w/]+\.py)`", text, flags=re.M)


def test_the_walk_is_short_and_names_nobody_twice() -> None:
    modules = walk()
    assert len(modules) == len(set(modules)) <= 25
    assert all((SOURCES / module).is_file() for module in modules)


def test_the_walk_is_the_call_stack_of_a_gradient_step(tmp_path: Path) -> None:
    stack: list[str] = []

    class Arrived(Exception):
        pass

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        inside = str(frame.f_globals.get("__name__", "")).startswith("prefed.rules.")
        if event != "call" or frame.f_code.co_name != "step" or not inside:
            return
        if frame.f_back is not None and frame.f_back.f_code.co_name == "_try":
            return  # the trial before the first round
        at: FrameType | None = frame
        while at is not None:
            path = Path(at.f_code.co_filename)
            if path.is_relative_to(SOURCES) and path != WATCH:
                stack.insert(0, path.relative_to(SOURCES).as_posix())
            at = at.f_back
        raise Arrived

    command = ["run", "digits-noniid", "--set", "rounds=1", "--set", "engine=sequential"]
    sys.setprofile(watch)
    try:
        with pytest.raises(Arrived):
            app([*command, "--out", str(tmp_path / "run"), "--quiet"], standalone_mode=False)
    finally:
        sys.setprofile(None)
    visited = list(dict.fromkeys(stack))
    text = (ROOT / "docs" / "tour.md").read_text().partition("<!-- the walk")[2].partition("## ")[0]
    numbered = re.findall(r"^\d+\. `([\w/]+\.py)`", text, flags=re.M)
    assert visited == numbered


def test_one_loop_over_rounds() -> None:
    """Outside of tests nobody counts rounds but `Run.rounds`."""
    loops = re.compile(
        r"(for|while)\b.*(\.rounds\b|num_rounds|run_round|server\.round\b).*:$", re.M
    )
    found = {
        f"{path.relative_to(SOURCES).as_posix()}: {match[0].strip()}"
        for path in SOURCES.rglob("*.py")
        for match in loops.finditer(path.read_text())
    }
    own = {line for line in found if "self.server.round < " in line}
    assert [line.partition(":")[0] for line in own] == ["training/run.py"]
    rest = {line for line in found - own if ".rounds(" not in line}
    assert not rest, rest
    assert prefed.Simulation is prefed.Run
