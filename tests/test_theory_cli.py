"""prefed theory: what it writes and says, on a small config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from prefed.report.sections import Section, Table, write_sections
from prefed.theory import studies
from tests.test_cli import prefed_command

SMALL = [
    "model.hidden=[6]", "data.split.clients=8", "clients_per_round=4", "local_steps=3", "rounds=6",
    "device=cpu",
]  # fmt: skip


def run(kind: str, folder: Path) -> dict[str, Any]:
    changes = [word for change in SMALL for word in ("--set", change)]
    done = prefed_command("theory", kind, "digits-noniid", *changes, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert "100 %" in done.stdout  # progress, as plain lines away from a terminal
    assert str(folder / "report.html") in done.stdout.replace("\n", "")
    html = (folder / "report.html").read_text()
    assert "prefed theory" in html or "prefed " in html
    assert "https://" not in html
    assert 'name = "digits"' in html
    found: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    assert found["environment"]["torch"]
    return found


def test_constants(tmp_path: Path) -> None:
    found = run("constants", tmp_path / "out")["constants"]
    for name in ("L", "G", "local", "local_largest", "spread", "gap"):
        estimate = found[name]
        assert 0 < estimate["low"] <= estimate["value"] <= estimate["high"]
    vectors = safetensors.torch.load_file(tmp_path / "out" / "coordinates.safetensors")
    assert math.isclose(float(vectors["global"].sum()), found["spread"]["value"], rel_tol=1e-4)
    assert (tmp_path / "out" / "report" / "coordinates.pdf").stat().st_size > 5000
    again = prefed_command("theory", "constants", "digits-noniid", "--out", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "is not empty" in again.stderr


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


def test_help_and_mistakes() -> None:
    assert "constants" in prefed_command("theory", "--help").stdout
    wrong = prefed_command("theory", "noise", "digits-nonid")
    assert wrong.returncode == 2
    assert "did you mean" in wrong.stderr


def test_pieces_are_counted_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar ends at 100 % on a config as large as the studies reckon with."""
    monkeypatch.setattr(studies, "BRIEF", 1)
    monkeypatch.setattr("prefed.theory.constants.PRODUCTS", 4)
    monkeypatch.setattr("prefed.theory.constants.DESCENT", 2)
    changes = ["model.hidden=[3]", "data.split.clients=30", "clients_per_round=4", "rounds=60"]
    told: list[str] = []
    studies.study_bounds("digits-noniid", changes, told.append)
    assert len(told) == 1 + 2 * 2 + 2 * (60 + len(studies.STEPS) + len(studies.COHORTS))


def test_names_of_users_are_escaped(tmp_path: Path) -> None:
    vile = "<script>alert(1)</script>"
    section = Section(vile, [vile], [Table((vile,), [(vile, vile)])])
    write_sections(tmp_path / "r.html", vile, [section], vile, {vile: vile})
    assert "<script>" not in (tmp_path / "r.html").read_text()
