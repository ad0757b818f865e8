"""Every shipped preset is right, and a round of it runs, on small data in the official format."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import prefed
from prefed import ALGORITHMS
from prefed.core.schedule import at
from prefed.experiments.config import algorithms_of, load
from prefed.experiments.run_directory import execute
from prefed.experiments.study import read as read_study
from prefed.experiments.toml_files import presets
from prefed.training import settings
from tests.helpers import official
from tests.helpers.run_folders import fingerprint, small

SMALL = {
    "cifar10": ["data.complete=false"],
    "cifar100": ["data.complete=false"],
    "mnist": ["data.complete=false"],
    "fashion-mnist": ["data.complete=false"],
}
OTHER_TEXT = ["data.skip=1", 'model.base=""']
"""The base that comes with prefed knows the characters of the whole text."""
ATTENTION = {"cifar10-vit", "shakespeare-gpt", "shakespeare-lora"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official.everything(tmp_path_factory.mktemp("data"))


SLOW = {"paper-cifar10-iid", "paper-cifar100-iid"}
"""As large as their non-iid ones, and different only in the split."""


@pytest.mark.long
@pytest.mark.process  # some have the engine that compiles
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in presets()]
)
def test_a_round_of_every_preset(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFED_DATA", str(data))
    whole = load(name)
    assert load(whole.to_dict()) == whole
    changes = ["rounds=1", "local_steps=1", "batch_size=2", "clients_per_round=1", "device=cpu"]
    changes += OTHER_TEXT if name == "shakespeare-lora" else []
    config = load(name, changes + SMALL.get(whole.data.name, []))
    record = config.make_run().run_round()
    assert record["test_loss"] is not None
    assert (record["test_accuracy"] is None) == (whole.data.target == "input")
    assert record["train_loss"] > 0


@pytest.mark.parametrize("name", presets())
def test_every_algorithm_has_its_own_step_sizes(name: str) -> None:
    tuned = algorithms_of(name)
    paper = {"fedavg", "adaalter", "fedadam", "prefed", "prefedopt"}
    shared = {
        n for n in ALGORITHMS.names() if not ALGORITHMS.get(n).model_fields["personal"].default
    } - {"fednova", "pair"}  # FedAvg where clients take equally many steps; any of the others
    shared -= {"fedcm", "fedlada", "fedadamw", "fedlion", "fedpm"}  # no study has tuned them yet
    shared -= {"fedmuon", "mimelite", "fedpac"}
    wanted = paper if name.startswith(("paper", "digits")) else shared
    if name.startswith("table"):
        wanted = {"fedavg"}  # and what else the table has
    if name in ATTENTION:
        wanted = paper - {"adaalter"} | {"fedavgm", "localadam", "fedadamw", "prefedlite"}
    assert set(wanted) <= set(tuned)
    for algorithm in tuned:
        assert "client_lr" in load(name, [f"algorithm={algorithm}"]).algorithm.options


def test_a_kind_of_fedavg_begins_with_its_step_sizes() -> None:
    avg, nova, m = (
        load("digits-noniid", [f"algorithm={name}"]).algorithm.options
        for name in ("fedavg", "fednova", "fedavgm")
    )
    assert nova == avg
    assert "client_momentum" in avg
    assert m != avg


@pytest.mark.parametrize("name", [n for n in presets() if n.startswith("paper")])
def test_the_papers_numbers(name: str) -> None:
    """Section 5 of the paper; the rest as in docs/paper.md."""

    def options(algorithm: str) -> tuple[list[float], list[float], dict[str, object]]:
        made = load(name, [f"algorithm={algorithm}"]).make_algorithm()
        rounds = (0, 19, 20, 40, 60)
        client = [at(made.client_lr, r) for r in rounds]
        return client, [at(made.server_lr, r) for r in rounds], made.model_dump()

    config = load(name)
    assert (config.rounds, config.local_steps, config.batch_size) == (80, 500, 32)
    assert config.clients_per_round == 10
    assert config.batches == "replacement"
    assert config.data.split.options["clients"] == 100
    assert config.data.split.name == ("dirichlet" if "noniid" in name else "iid")
    assert config.data.split.options.get("alpha", 0.5) == 0.5
    kind = "cifar100" if "cifar100" in name else "cifar10"
    assert config.data.name == kind
    assert config.model.name == {"cifar10": "resnet18", "cifar100": "resnet34"}[kind]

    client, server, rest = options("fedavg")
    assert client == pytest.approx([0.05, 0.05, 0.005, 0.0005, 0.00005])
    assert rest["client_momentum"] == 0.9
    for adaptive in ("adaalter", "fedadam", "prefed", "prefedopt"):
        client, server, rest = options(adaptive)
        assert client == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5, 1e-6])
        assert rest["tau"] == 1e-3
        if adaptive in ("fedadam", "prefedopt"):
            assert server == pytest.approx([0.05, 0.05, 0.05, 0.005, 0.005])
        if adaptive != "adaalter":
            assert rest["beta1"] == 0.9
            assert rest["beta2"] == (0.99 if adaptive == "fedadam" else 0.9)


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "adaalter", "prefed", "prefedopt"])
def test_the_papers_protocol_on_a_smaller_network(name: str) -> None:
    """The table differs from the paper's preset in the network, and in what changes no number."""
    whole, small = (
        load(preset, [f"algorithm={name}"]).to_dict()
        for preset in ("paper-cifar10-iid", "table-paper-cifar10")
    )
    differ = {key for key in whole.keys() | small.keys() if whole.get(key) != small.get(key)}
    assert differ == {"model", "engine", "evaluate_every"}


def test_what_is_shipped_is_packaged() -> None:
    root = Path(prefed.__file__).parent
    about = tomllib.loads((root.parent.parent / "pyproject.toml").read_text())
    patterns = about["tool"]["setuptools"]["package-data"]["prefed"]
    packaged = {path for pattern in patterns for path in root.glob(pattern)}
    files = {path for path in root.rglob("*") if path.is_file() and path.suffix != ".py"}
    assert not {path for path in files - packaged if "__pycache__" not in path.parts}


def test_workers_as_many_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with one, and a word in the config, whatever the machine."""
    monkeypatch.setattr(settings, "usable_threads", lambda: 2)
    for workers in ("1", "cores"):
        config = small("prefed", "engine=sequential", f"workers={workers}")
        result = execute(config, tmp_path / workers)
        assert config.to_dict()["workers"] == (1 if workers == "1" else "cores")
        about = json.loads((tmp_path / workers / "environment.json").read_text())
        assert about["engine"].startswith(f"sequential x {1 if workers == '1' else 2}")
        assert len(result.history) == 5
    assert fingerprint(tmp_path / "1") == fingerprint(tmp_path / "cores")
    execute(config, tmp_path / "cores", resume=True)
    assert load("cifar10-small").to_dict()["workers"] == "cores"
    _, study = read_study("cifar10-noniid")
    assert study.make_config("fedavg", "fedavg", {}).workers == 1  # a process has one core
