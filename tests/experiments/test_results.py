"""The results in the docs are what their records say."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from prefed.experiments.config import algorithms_of, load
from prefed.experiments.study import read
from prefed.experiments.study_runs import StudyRuns
from prefed.experiments.toml_files import studies
from prefed.report import study_results as results
from tests.helpers import ROOT

RESULTS = ROOT / "docs" / "results"
DONE = sorted(path.stem for path in RESULTS.glob("*.json"))


FEW = {"shakespeare", "digits-autoencoder", "upload-cifar10"}
"""Of accuracies, of losses and of codecs; make test-all draws all of them."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in DONE]
)
def test_the_table_is_that_of_the_runs(name: str, tmp_path: Path) -> None:
    """Drawn again from the committed records, as `prefed study NAME --draw` does it."""
    assert name in studies()
    _, study = read(name)
    shutil.copytree(RESULTS / study.config, tmp_path / study.config)
    study_runs = StudyRuns(study, tmp_path)
    found = {label: sorted(seeds) for label, seeds in study_runs.runs().items()}
    wanted = {label: [*range(study.seeds)] for label in study.compared()}
    assert found == wanted
    results.write(study_runs, name)
    for kind in ("md", "json"):
        there = (RESULTS / f"{name}.{kind}").read_text()
        assert (tmp_path / f"{name}.{kind}").read_text() == there


@pytest.mark.parametrize("name", DONE)
def test_presets_have_what_was_tuned(name: str) -> None:
    """The best points of the committed scores are the options of the preset."""
    _, study = read(name)
    study_runs = StudyRuns(study, RESULTS) if study.grid else None
    for algorithm, point in study_runs.best().items() if study_runs else ():
        assert algorithm in algorithms_of(study.config)
        preset = load(study.config, [f"algorithm={algorithm}"])
        assert preset.algorithm == study.make_config(algorithm, algorithm, point).algorithm


def test_claims_are_those_of_the_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
    assert spec is not None
    assert spec.loader is not None
    claims = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "claims", claims)
    spec.loader.exec_module(claims)
    assert claims.text() == (RESULTS / "claims.md").read_text()


def test_every_study_of_the_docs_has_its_numbers() -> None:
    for page in ("results.md", "upload.md"):
        for line in (ROOT / "docs" / page).read_text().splitlines():
            if line.startswith("```{include} results/"):
                table = ROOT / "docs" / line.partition(" ")[2]
                assert table.exists()
                if table.stem not in ("claims", "untuned"):
                    assert json.loads(table.with_suffix(".json").read_text())["lines"]


def test_a_claim_about_some_studies_is_judged_by_these(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    claims = importlib.import_module("claims")
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    for name in ("cifar10-vit", "digits-iid"):
        lines = [
            {"label": label, "measure": "test_accuracy", "values": {"0": v, "1": v + 0.1, "2": v},
             "jumps": {"0": 1.0, "1": 1.0, "2": 1.0}}
            for label, v in (("PreFed", 50.0), ("FedAvg", 40.0), ("FedAdam", 60.0))
        ]  # fmt: skip
        text = json.dumps({"config": name, "lines": lines, "tuned": {}})
        (tmp_path / f"{name}.json").write_text(text)
    rows = [line for line in claims.text().splitlines() if "attention" in line]
    assert [row.split(" | ")[1] for row in rows] == ["cifar10-vit"] * 2
    assert "PreFed, not FedAvg" in rows[0]
    assert rows[0].endswith("| holds |")
    assert "PreFed, not FedAdam" in rows[1]
    assert rows[1].endswith("| does not hold |")
