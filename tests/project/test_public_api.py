"""The public API does not change unnoticed."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import prefed
from tests.helpers.problems import tiny_data, tiny_model
from tests.project import public_api

HOW = """the public API has changed:
{}
Is a name, an option or a default gone or different? Then old code breaks: keep the old one working
with a warning, and say so in CHANGELOG.md. If the change is meant, run
    python -m tests.project.public_api
and commit public_api.json with it."""


def differences(there: Any, here: Any, path: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted({*there, *here})
        return [
            line
            for key in keys
            for line in differences(there.get(key), here.get(key), f"{path}{key}: ")
        ]
    if isinstance(there, list) and isinstance(here, list):
        gone, new = ([x for x in a if x not in b] for a, b in ((there, here), (here, there)))
        lines = [f"  {path}- {x}" for x in gone] + [f"  {path}+ {x}" for x in new]
        return lines or ([f"  {path}another order"] if there != here else [])
    return [] if there == here else [f"  {path}{there} is now {here}"]


def test_the_public_api_is_the_one_that_is_written_down() -> None:
    there = json.loads(public_api.FILE.read_text())
    lines = differences(there, public_api.describe())
    assert not lines, HOW.format("\n".join(lines))


def test_differences_are_named() -> None:
    a = {"x": ["a", "b"], "y": {"z": "1"}, "w": [1, 2]}
    b = {"x": ["a", "c"], "y": {"z": "2"}, "w": [2, 1]}
    assert differences(a, b) == [
        "  w: another order", "  x: - b", "  x: + c", "  y: z: 1 is now 2"
    ]  # fmt: skip
    assert differences(a, a) == []


class Config(prefed.Callback):
    def on_start(self, config: dict[str, Any]) -> None:
        self.seen = config


def test_simulate_has_the_defaults_of_the_settings() -> None:
    """As a run sees them that is given nothing else, and as the signature shows them."""
    seen = Config()
    prefed.simulate(
        prefed.FedAvg(), tiny_model(), tiny_data(), rounds=1, local_steps=1, callbacks=[seen]
    )
    wanted = prefed.Settings(rounds=1, local_steps=1)
    assert {name: seen.seen[name] for name in prefed.Settings.model_fields} == wanted.model_dump()
    assert seen.run.settings == wanted
    parameters = inspect.signature(prefed.simulate).parameters
    own = {"algorithm", "model", "data", "loss", "callbacks", "out", "resume", "progress"}
    assert parameters.keys() - own == prefed.Settings.model_fields.keys()
    for name in parameters.keys() - own:
        empty = parameters[name].default is inspect.Parameter.empty
        assert empty == (name == "rounds"), name
        given = name in ("rounds", "local_steps")
        assert given or parameters[name].default == getattr(wanted, name), name


def test_every_setting_is_explained() -> None:
    text = inspect.getdoc(prefed.simulate) or ""
    for name in inspect.signature(prefed.simulate).parameters:
        found = re.search(rf"^ *{name} +(\S.*)$", text, flags=re.M)
        assert found, name
        assert len(found[1]) > 10, name
