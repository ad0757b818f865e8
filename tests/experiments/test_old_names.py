"""What earlier versions called otherwise still works, and says its new name."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import prefed
from prefed import _api
from prefed._moved import MOVED, PUBLIC
from prefed.experiments.config import load
from prefed.flower.deployment_options import Options
from tests.helpers.problems import tiny_data, tiny_model
from tests.helpers.run_folders import small

BEFORE = [
    "ALGORITHMS", "CODECS", "DATASETS", "ENGINES", "MODELS", "SCAFFOLD", "SPLITS", "AdaAlter",
    "Algorithm", "Callback", "CollapseWarning", "Diverged", "EngineWarning", "FedAdagrad",
    "FedAdam", "FedAvg", "FedAvgM", "FedProx", "FedYogi", "FederatedData", "Field", "Interrupted",
    "LocalAdam", "Partition", "PreFed", "PreFedLite", "PreFedOpt", "PreFedSync", "PrefedError",
    "Result", "Rule", "Settings", "Simulation", "average", "derived", "keep", "load_runs",
    "optim", "reset", "schedule", "simulate", "to_pandas",
]  # fmt: skip
"""The public names of the version before modules were put into layers (revision 3c5a0d4)."""


@pytest.mark.parametrize("name", BEFORE)
def test_public_names_are_still_there(name: str) -> None:
    assert name in _api.__all__
    assert getattr(prefed, name) is not None
    assert name in dir(prefed)


@pytest.fixture
def forgotten() -> None:
    """As in a process that has not imported an old name yet."""
    for name in {*MOVED, *PUBLIC} & {*sys.modules}:
        del sys.modules[name]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_has_moved(old: str) -> None:
    new = MOVED[old]
    with warnings.catch_warnings(record=True) as seen:  # others' libraries may warn as well
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert f"{old} has moved to {new}" in {str(w.message) for w in seen}
    assert found is importlib.import_module(new)
    assert found.__name__ == new
    assert found.__spec__ is not None
    assert found.__spec__.name == new


@pytest.mark.usefixtures("forgotten")
def test_the_place_of_the_import_is_what_the_warning_shows(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("import prefed.simulation\n")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.syspath_prepend(str(tmp_path))
        importlib.import_module("theirs")
        del sys.modules["theirs"]
    assert any("prefed.simulation has moved" in str(w.message) for w in seen)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_has_two_names_and_no_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = importlib.import_module(name)
    assert found is importlib.import_module(PUBLIC[name])
    assert found is getattr(prefed, name.partition(".")[2])


def test_simulation_is_run() -> None:
    assert prefed.Simulation is prefed.Run


SAYS = "the option dropout is now called client_dropout"


def test_dropout_in_a_toml_file(tmp_path: Path) -> None:
    table = small("fedavg").to_dict()
    del table["client_dropout"]
    (tmp_path / "old.toml").write_text(tomli_w.dumps({"dropout": 0.25, **table}))
    with pytest.warns(FutureWarning, match=SAYS):
        config = load(str(tmp_path / "old.toml"))
    assert config.client_dropout == 0.25
    assert config.make_run().settings.client_dropout == 0.25
    assert "dropout" not in config.to_dict()


def test_dropout_with_set() -> None:
    with pytest.warns(FutureWarning, match=SAYS):
        config = load("digits-noniid", ["dropout=0.25"])
    assert config.client_dropout == 0.25
    with (
        pytest.warns(FutureWarning, match=SAYS),
        pytest.raises(prefed.PrefedError, match="client_dropout: should be less than 1"),
    ):
        load("digits-noniid", ["dropout=1.5"])


def test_dropout_in_simulate() -> None:
    options: dict[str, Any] = {"rounds": 4, "local_steps": 1, "device": "cpu", "seed": 1}
    with pytest.warns(FutureWarning, match=SAYS) as seen:
        old = prefed.simulate(
            prefed.FedAvg(), tiny_model(), tiny_data(), dropout=0.5, **options
        )  # fmt: skip
    assert len(seen) == 1
    new = prefed.simulate(
        prefed.FedAvg(), tiny_model(), tiny_data(), client_dropout=0.5, **options
    )  # fmt: skip
    dropped = [[r.get("dropped") for r in run.history] for run in (old, new)]
    assert dropped[0] == dropped[1]
    assert any(dropped[0])


def test_quorum_of_a_deployment() -> None:
    with pytest.warns(FutureWarning, match="min-fraction"):
        options = Options.from_run_config({"quorum": 0.5})
    assert options.min_fraction == 0.5
