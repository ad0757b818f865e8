"""Runs that the version before this one began: read, reported on, and resumed to the same end.

tests/experiments/before holds three of them, stopped after two of four rounds, with the records and
weights in which that version ended (expected.json). The bits of a float depend on the processor:
what is counted is compared exactly, losses and weights to five digits. On one machine
scripts/same_bits.py compares two versions bit for bit.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import prefed
from prefed.experiments.config import load
from prefed.experiments.run_directory import execute
from prefed.experiments.same_config import diff, read_config
from prefed.report import write_report

BEFORE = Path(__file__).parent / "before"
NAMES = sorted(path.name for path in BEFORE.iterdir())
CHANGES = ["rounds=4", "local_steps=2", "model.hidden=[4]", "clients_per_round=3", "device=cpu",
           "engine=sequential"]  # fmt: skip
COMMANDS = {
    "scaffold": [*CHANGES, "algorithm=scaffold", "client_dropout=0.2"],
    "prefedopt": [*CHANGES, "algorithm=prefedopt", "shape=kronecker", "refresh=3"],
    "batchnorm": ["rounds=4", "local_steps=2", "clients_per_round=3", "device=cpu",
                  "engine=sequential", "algorithm=fedavg", "model=resnet8", "model.width=2",
                  "model.norm=batch"],
}  # fmt: skip
"""Each written by the version before it; that of "batchnorm" sent the counters of batches too."""
COUNTERS = {"batchnorm": 9}
SENT = {"bytes_up", "bytes_down", "bytes_up_weights", "bytes_down_weights"}
MEASURED = {"train_loss", "test_loss", "test_accuracy", "adaptive_share", "median_step"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BEFORE, tmp_path / "runs"))


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BEFORE / name / "expected.json").read_text())
    return found


def check_end(folder: Path, name: str) -> None:
    lines = (folder / name / "rounds.jsonl").read_text().splitlines()
    records, wanted = [json.loads(line) for line in lines], expected(name)
    for record, before in zip(records, wanted["records"], strict=True):
        assert before.keys() <= record.keys()
        for key, value in before.items():
            if key in SENT and record["round"] > 2:  # by this version, and without counters
                assert record[key] == value - 4 * len(record["cohort"]) * COUNTERS.get(name, 0)
            elif key in MEASURED and value is not None:
                assert record[key] == pytest.approx(value, rel=1e-5), key
            else:
                assert record[key] == value, key
    model = safetensors.torch.load_file(folder / name / "model.safetensors")
    assert model.keys() == wanted["weights"].keys()
    rtol, atol = 1e-5, 1e-7
    if not rounds_alike(name):
        # The root of a covariance matrix divides rounding errors by tau where P is small.
        rtol, atol = 1e-3, 1e-5
    for key, tensor in model.items():
        before = torch.tensor(wanted["weights"][key], dtype=torch.float64)
        torch.testing.assert_close(tensor.double().flatten(), before, rtol=rtol, atol=atol)


@cache
def rounds_alike(name: str) -> bool:
    """This processor rounds as the one did that the run was begun on: the first two rounds, when
    computed anew, end in the weights of the checkpoint."""
    run = load("digits-noniid", COMMANDS[name]).make_run()
    for _ in run.rounds(until=2):
        pass
    (saved,) = (BEFORE / name / "checkpoints").glob("*2/state.safetensors")
    return torch.equal(run.server.weights, safetensors.torch.load_file(saved)["weights"])


def test_all_are_there() -> None:
    assert set(NAMES) == set(COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_to_the_same_end(name: str, folder: Path) -> None:
    config = load("digits-noniid", COMMANDS[name])
    assert not diff(read_config(folder / name), config.to_dict())
    result = execute(config, folder / name, resume=True)
    assert [record["round"] for record in result.history] == [1, 2, 3, 4]
    check_end(folder, name)
    if name == "scaffold":
        assert any("dropped" in record for record in result.history)


def test_the_config_that_was_written_then_can_be_run_now(folder: Path) -> None:
    """By its old word, from its own file, in a directory of its own and in the old one."""
    path = folder / "scaffold" / "config.toml"
    assert "\ndropout = 0.2\n" in path.read_text()
    with pytest.warns(FutureWarning, match="client_dropout"):
        config = load(str(path))
    for where in ("scaffold", "anew"):
        execute(config, folder / where, resume=True)
    check_end(folder, "scaffold")
    written = (folder / "anew" / "config.toml").read_text()
    assert "\nclient_dropout = 0.2\n" in written
    a, b = (safetensors.torch.load_file(folder / n / "model.safetensors")
            for n in ("scaffold", "anew"))  # fmt: skip
    for key, value in a.items():
        if rounds_alike("scaffold"):
            assert torch.equal(value, b[key])
        else:  # the first rounds of one are of another processor
            torch.testing.assert_close(value, b[key], rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_it_can_be_read_and_reported_on(folder: Path) -> None:
    runs = prefed.load_runs(folder)
    assert [(run.algorithm, run.status, len(run.history)) for run in runs] == [
        ("fedavg", "interrupted", 2),
        ("prefedopt", "interrupted", 2),
        ("scaffold", "interrupted", 2),
    ]
    assert len(prefed.to_pandas(folder)) == 6
    write_report(runs, folder / "report.html", title="before")
    html = (folder / "report.html").read_text()
    assert "scaffold" in html
    assert "prefedopt" in html


def test_another_config_is_still_another(folder: Path) -> None:
    config = load("digits-noniid", [*COMMANDS["scaffold"], "client_dropout=0.3"])
    with pytest.raises(prefed.PrefedError, match=r"client_dropout: 0\.2 there, 0\.3 asked for"):
        execute(config, folder / "scaffold", resume=True)
