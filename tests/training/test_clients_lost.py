"""Clients that do not answer, and clients whose update is not finite."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

import prefed
from prefed.core import draws
from prefed.experiments import run_directory
from prefed.experiments.config import load
from tests.helpers.bad_client import BAD, rounds
from tests.helpers.problems import tiny_data, tiny_model
from tests.helpers.run_folders import fingerprint


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ["fedadam", "prefed", "scaffold"])
def test_a_bad_client_is_left_out_to_the_bit(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "prefed"):
        with_it = rounds(name, 3, engine=engine, workers=2, on_divergence="continue")
    assert "round 2: client 2 is left out: its update is not finite" in caplog.text
    assert [r["left_out"] for r in with_it.history] == [[BAD]] * 3
    monkeypatch.setattr(
        draws, "answering", lambda seed, round, cohort, share: [c for c in cohort if c != BAD]
    )
    without = rounds(name, 3, engine=engine)
    expected = without.snapshot()
    for key, value in with_it.snapshot().items():
        assert torch.equal(value, expected[key]), key
        assert value.isfinite().all()
    losses = [[r["train_loss"] for r in s.history] for s in (with_it, without)]
    assert losses[0] == losses[1]


def test_by_default_it_stops_the_run_and_says_so() -> None:
    with pytest.raises(prefed.Diverged, match=r"round 1: the training loss .*Lower client_lr"):
        rounds("fedavg", 1)


def test_in_lockstep_the_round_is_lost() -> None:
    simulation = rounds("prefedsync", 2, on_divergence="continue")
    assert [r.get("skipped") for r in simulation.history] == [True, True]
    assert torch.equal(simulation.server.weights, rounds("prefedsync", 0).server.weights)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_dropout(share: float) -> None:
    """Below the quorum the model stays as it was; above it only those who answer count."""
    settings = prefed.Settings(
        rounds=40, local_steps=1, batch_size=4, device="cpu", client_dropout=share, quorum=3, seed=5
    )
    simulation = prefed.Simulation(prefed.SCAFFOLD(), tiny_model(), tiny_data(), settings)
    skipped = dropped = 0
    for _ in range(40):
        before = {name: value.clone() for name, value in simulation.snapshot().items()}
        record = simulation.run_round()
        gone = record.get("dropped", [])
        dropped += len(gone)
        assert record["bytes_up"] * 6 == record["bytes_down"] * (6 - len(gone))
        if 6 - len(gone) < 3:
            skipped += 1
            assert record["skipped"]
            assert math.isnan(record["train_loss"])
            after = simulation.snapshot()
            assert before.keys() == after.keys()
            assert all(torch.equal(after[name], value) for name, value in before.items())
        else:
            assert "skipped" not in record
            assert not torch.equal(simulation.server.weights, before["weights"])
    assert simulation.server.round == 40
    assert (skipped > 0) == (share > 0)
    assert dropped / 240 == pytest.approx(share, abs=0.08)


def test_dropped_clients_are_the_same_in_every_engine_and_after_a_resume(tmp_path: Path) -> None:
    changes = ["rounds=4", "local_steps=2", "model.hidden=[8]", "clients_per_round=5", "device=cpu"]
    changes += ["client_dropout=0.5", "quorum=2", "algorithm=scaffold", "seed=1"]
    config = load("digits-noniid", changes)
    whole = run_directory.execute(config, tmp_path / "whole")
    left = iter([False, True])
    with pytest.raises(prefed.Interrupted):
        run_directory.execute(config, tmp_path / "parts", stop=lambda: next(left))
    run_directory.execute(config, tmp_path / "parts", resume=True)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
    other = run_directory.execute(
        load("digits-noniid", [*changes, "engine=vectorised", "workers=2"])
    )
    told = [[(r.get("dropped"), r.get("skipped")) for r in x.history] for x in (whole, other)]
    assert told[0] == told[1]
    assert any(gone for gone, _ in told[0])


def test_a_round_without_answers_is_not_a_divergence(tmp_path: Path) -> None:
    changes = ["rounds=2", "local_steps=1", "model.hidden=[8]", "clients_per_round=3"]
    config = load("digits-noniid", [*changes, "client_dropout=0.99", "quorum=3", "device=cpu"])
    run_directory.execute(config, tmp_path / "run")
    stored = prefed.load_runs(tmp_path)[0]
    assert [r["skipped"] for r in stored.history] == [True, True]
    assert stored.status == "finished"


def test_a_quorum_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(prefed.PrefedError, match="quorum: 7 is more than the 6 of a cohort"):
        prefed.simulate(
            prefed.FedAvg(), tiny_model(), tiny_data(), rounds=1, local_steps=1, quorum=7
        )
