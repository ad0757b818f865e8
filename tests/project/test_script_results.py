"""Tables that scripts made are those of the runs that are stored beside them."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from tests.helpers import ROOT

RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("name", ["attackers", "phones", "privacy"])
def test_the_table_is_redrawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the scripts would set
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module, runs = import_module(name), json.loads((RESULTS / name / "runs.json").read_text())
    made = module.table(runs, 60) if name == "privacy" else module.text(runs)
    assert made == (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["search", "untuned"])
def test_the_table_of_scores_is_redrawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module, scores = import_module(name), json.loads((RESULTS / name / "scores.json").read_text())
    made = module.text(scores) if name == "search" else module.text(scores, RESULTS)
    assert made == (RESULTS / f"{name}.md").read_text()
