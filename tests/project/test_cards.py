"""The card of each algorithm: whole, in words of ours, with numbers from records alone."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import prefed
from prefed.experiments.stored_runs import load_archive
from tests.helpers import ROOT

NAMES = prefed.ALGORITHMS.names()


@pytest.fixture(scope="module")
def cards() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        spec = importlib.util.spec_from_file_location("cards", ROOT / "docs" / "cards.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["cards"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return module


@pytest.fixture(scope="module")
def results(cards: Any) -> Any:
    return cards.results()


def test_words_are_of_algorithms_and_hold_no_results(cards: Any) -> None:
    assert sorted(cards.WORDS) == sorted(NAMES)
    for words in cards.WORDS.values():
        assert {*words} == {"reference", "use"}
        assert not re.search(r"\d", words["use"])
        assert "no single source" in words["reference"] or "20" in words["reference"] or (
            "Preconditioned Federated Learning" in words["reference"]
        )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_a_whole_card(cards: Any, results: Any, name: str) -> None:
    card = cards.card(name, results[name])
    assert card.startswith(f"## {prefed.ALGORITHMS.get(name).__name__}\n")
    for part in ("From.", "Use it for.", "Bytes.", "Options", "Results.", "- On a client:"):
        assert part in card, part
    steps = card[card.index("- On a client:") : card.index("**From.**")]
    assert steps.count("=") >= 2, "a formula for each side"
    assert steps.count("```") % 2 == 0
    for option in prefed.ALGORITHMS.get(name).model_fields.keys() - prefed.Algorithm.model_fields:
        assert f"| `{option}` |" in card


@pytest.mark.parametrize(("name", "up"), [
    ("fedavg", 1), ("fedadam", 1), ("prefedopt", 1), ("adaalter", 2), ("scaffold", 2),
    ("prefed", 3),
])  # fmt: skip
def test_bytes_are_those_of_the_readme(cards: Any, name: str, up: int) -> None:
    found, size = cards.shared(name)
    assert found["bytes_up"] == up * size
    assert f"({up} d)" in cards.bytes_line(name)


def test_results_are_those_of_the_records(cards: Any, results: Any) -> None:
    """Of one study and of one table, computed from the archives here."""
    folder = ROOT / "docs" / "results"
    runs = load_archive(folder / "digits-noniid").values()
    study = json.loads((folder / "digits-noniid.json").read_text())
    row = next(o for o in results["fedadam"] if study["title"] in o.task)
    finals = []
    for run in runs:
        if run.algorithm == "fedadam":
            seen = [r["test_accuracy"] for r in run.history if r["test_accuracy"] is not None]
            finals.append(fmean(seen[-len(seen) // 10 :]))
    assert len(finals) == 5
    assert row.found.startswith(f"{100 * fmean(finals):.4g} [")

    runs = load_archive(folder / "tables" / "mcmahan-2nn").values()
    cell = next(o for o in results["fedavg"] if "mcmahan-2nn" in o.task)
    assert "C = 0.1, iid" in cell.task
    assert cell.printed == "87"
    seconds = [run.total("seconds") for run in runs]
    assert cell.seconds in seconds


def test_what_a_run_was_computed_on_is_kept(tmp_path: Path, cards: Any) -> None:
    from prefed.experiments.stored_runs import StoredRun, write_archive

    record = {"round": 1, "train_loss": 1.0, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    config = {"algorithm": {"name": "fedavg"}, "rounds": 1}
    machine = {"processor": "a slow one", "cores": 2, "torch": "2", "python": "3"}
    for about in ({}, machine):
        write_archive(tmp_path, [StoredRun(tmp_path / "a", config, [record], about)])
        run = load_archive(tmp_path)["a"]
        expected = "a slow one, 2 cores, torch 2" if about else ""
        assert cards.machine([run]) == expected
