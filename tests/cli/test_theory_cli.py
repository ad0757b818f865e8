"""prefed theory: what it writes and says, on a small config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from click.testing import Result
from typer.testing import CliRunner

from prefed.cli import app
from prefed.core.errors import PrefedError
from prefed.report.sections import Section, Table, write_sections

SMALL = [
    "model.hidden=[6]", "data.split.clients=8", "clients_per_round=4", "local_steps=3", "rounds=6",
    "device=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefed.theory.studies.bounds_study.BRIEF", 3)
    monkeypatch.setattr("prefed.theory.constants.PRODUCTS", 10)
    monkeypatch.setattr("prefed.theory.constants.DESCENT", 10)


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["theory", *words])


def run(kind: str, folder: Path) -> dict[str, Any]:
    changes = [word for change in SMALL for word in ("--set", change)]
    done = command(kind, "digits-noniid", *changes, "--out", str(folder))
    assert done.exit_code == 0, done.exception
    assert "100 %  " in done.stdout  # progress, as plain lines away from a terminal
    assert f"report: {folder / 'report.html'}" in done.stdout
    html = (folder / "report.html").read_text()
    assert "https://" not in html
    assert "name = &#34;digits&#34;" in html
    found: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    assert found["environment"]["torch"]
    return found


@pytest.mark.long
def test_constants(tmp_path: Path) -> None:
    found = run("constants", tmp_path / "out")["constants"]
    for name in ("L", "G", "local", "local_largest", "spread", "gap"):
        estimate = found[name]
        assert 0 < estimate["low"] <= estimate["value"] <= estimate["high"]
    vectors = safetensors.torch.load_file(tmp_path / "out" / "coordinates.safetensors")
    assert math.isclose(float(vectors["global"].sum()), found["spread"]["value"], rel_tol=1e-4)
    assert (tmp_path / "out" / "report" / "coordinates.pdf").stat().st_size > 5000
    again = command("constants", "digits-noniid", "--out", str(tmp_path / "out"))
    assert isinstance(again.exception, PrefedError)
    assert "is not empty" in str(again.exception)


@pytest.mark.long
def test_bounds(tmp_path: Path) -> None:
    found = run("bounds", tmp_path / "out")
    assert found["client_lr"] == pytest.approx(1 / (5**0.5 * 3 * found["constants"]["L"]["value"]))
    for name in ("prefed", "prefedopt"):
        assert len(found["divergence"][name]) == found["T"] == 6
        assert len(found["gradient"][name]) == 7
        assert set(found["rates"][name]) == {"T", "K", "m"}
    case_2 = found["claims"]["lemma"]["Lemma 1, case II"]
    assert all(a < b for a, b in zip(found["divergence"]["prefedopt"], case_2, strict=True))
    names = {p.stem for p in (tmp_path / "out" / "report").iterdir()}
    assert names == {"divergence", "gradient", "rate-K", "rate-m"}


@pytest.mark.long
def test_noise(tmp_path: Path) -> None:
    found = run("noise", tmp_path / "out")["noise"]
    quadratic = found["quadratic"]["perfect"]
    assert quadratic["full"]["condition"] < 2 < quadratic["diagonal"]["condition"]
    for r in found["quadratic"]["reductions"]:
        assert r["with_sum"] == pytest.approx(1 / r["m"] ** 2, rel=0.1)
        assert r["with_mean"] == pytest.approx(1 / r["m"], rel=0.1)
    for where in ("the first weights", "after 10 rounds"):
        assert (
            found[where]["perfect"]["full"]["distance"]
            < found[where]["perfect"]["none"]["distance"]
        )


def test_help_and_mistakes(tmp_path: Path) -> None:
    assert "constants" in command("--help").stdout
    wrong = command("noise", "digits-nonid", "--out", str(tmp_path / "out"))
    assert isinstance(wrong.exception, PrefedError)
    assert "did you mean" in str(wrong.exception)


def test_names_of_users_are_escaped(tmp_path: Path) -> None:
    vile = "<script>alert(1)</script>"
    section = Section(vile, [vile], [Table((vile,), [(vile, vile)])])
    write_sections(tmp_path / "r.html", vile, [section], vile, {vile: vile})
    assert "<script>" not in (tmp_path / "r.html").read_text()


@pytest.mark.long
def test_bounds_of_two_clients_have_no_rate_in_m(tmp_path: Path) -> None:
    changes = [word for change in SMALL for word in ("--set", change)]
    few = ["--set", "data.split.clients=2", "--set", "clients_per_round=2"]
    done = command("bounds", "digits-noniid", *changes, *few, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.exception
    found = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert found["claimed_rates"]["prefed"]["m"] is None
    assert found["claimed_rates"]["prefed"]["T"] < 0
