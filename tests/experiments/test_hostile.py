"""What fuzzing has found, one by one: refused in words, with the place."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import prefed
from prefed.core.safe_files import read_whole
from prefed.data.own import read_npz
from prefed.experiments import checkpoints
from prefed.experiments.config import load
from prefed.experiments.record_lines import NotARecord, from_json
from prefed.experiments.toml_files import read_toml

GOOD = {"round": 1, "train_loss": None, "bytes_up": 1, "bytes_down": 1, "seconds": 0.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 9_000, "not valid TOML: .*recursion"),
        ("rounds = " + "9" * 5_000, "not valid TOML: .*4300 digits"),
        ("a." * 20_000 + "b = 1", "too long for a config"),
        ("# much\n" * 50_000, "too long for a config"),
        ("a = '\udcff'", "cannot be read|not valid"),
    ],
)
def test_toml_without_end(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(prefed.PrefedError, match=message):
        read_toml(path)


def test_a_number_too_long_to_print(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 0x" + "f" * 5_000)
    with pytest.raises(prefed.PrefedError, match=r"seed: .*not this int"):
        load(str(path))


def test_tuned_values_are_tables() -> None:
    with pytest.raises(prefed.PrefedError, match="tuned: should hold tables"):
        load({"algorithm": "prefed", "tuned": {"prefed": False}})


def test_a_schedule_that_grows_without_end() -> None:
    assert prefed.schedule.at(prefed.schedule.step(1.0, decay=1e300, every=1), 9) == math.inf


def test_a_model_that_cannot_be_built() -> None:
    config = load("digits-noniid", ["model.hidden=[1000000000000000000]"])
    with pytest.raises(prefed.PrefedError, match="model: mlp cannot be built so"):
        config.make_run()


@pytest.mark.parametrize(
    "record", [None, 3, [], {}, {**GOOD, "seconds": None}, {**GOOD, "train_loss": []},
               {**GOOD, "test_accuracy": "1"}, {**GOOD, "adaptive_share": {}}],
)  # fmt: skip
def test_records_are_checked(record: object, tmp_path: Path) -> None:
    assert from_json(json.dumps(GOOD)) == GOOD
    with pytest.raises(NotARecord):
        from_json(json.dumps(record))
    (tmp_path / "config.toml").write_text("rounds = 3\n[algorithm]\nname = 'fedavg'\n")
    (tmp_path / "rounds.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(prefed.PrefedError, match=r"rounds.jsonl:2: not a record of a round"):
        prefed.load_runs(tmp_path)


def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="is not a file"):
            read_whole(path)


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    read = prefed.DATASETS.get("npz")
    np.savez(path, x=np.eye(3), y=np.float64(1))
    with pytest.raises(prefed.PrefedError, match=r"y \(\) should have the same length"):
        read(path=str(path))
    np.savez(path, x=np.eye(3), y=np.arange(3), x_test=np.eye(3), y_test=np.arange(2))
    with pytest.raises(prefed.PrefedError, match=r"x_test .* should have the same length"):
        read(path=str(path))


def test_archives_that_are_damaged_inside_or_packed_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).integers(9, size=500))
    content = bytearray(path.read_bytes())
    content[300] ^= 255
    content[301] ^= 255
    path.write_bytes(content)
    with pytest.raises(prefed.PrefedError, match=r"not a readable \.npz"):
        read_npz(path)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", b"\x93NUMPY")
    path.write_bytes(out.getvalue())
    with pytest.raises(prefed.PrefedError, match="not compressed as numpy does it"):
        read_npz(path)


def test_checkpoints_go_by_number_not_by_name(tmp_path: Path) -> None:
    """After round 999,999 names are longer: "1000000" stands before "999999"."""
    for round in (999_998, 999_999, 1_000_000):
        state = {"weights": torch.tensor([float(round)])}
        checkpoints.save(tmp_path, "run", checkpoints.Checkpoint(round, state, "\n" * round, "x"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1000000", "999999"]
    assert checkpoints.load(tmp_path, "run").round == 1_000_000
