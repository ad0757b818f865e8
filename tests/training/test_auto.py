"""engine = "auto", and what stands around it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.experiments.config import load
from prefed.training.engines import auto
from prefed.training.engines.auto import Choice
from prefed.training.engines.workers import Workers
from prefed.training.local_trainer import LocalTrainer
from prefed.training.task import Task
from tests.helpers.commands import prefed_here
from tests.helpers.problems import local


def simulation(*changes: str) -> prefed.Simulation:
    short = ("rounds=3", "local_steps=3", "device=cpu", "model.hidden=[16]", *changes)
    made: prefed.Simulation = load("digits-iid", short).make_run()
    return made


def run(made: prefed.Simulation) -> torch.Tensor:
    for _ in range(3):
        made.run_round()
    return made.server.weights


def test_auto_measures_and_says_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto, "SHORT", 0)
    made = simulation("algorithm=scaffold")
    with caplog.at_level(logging.INFO, "prefed"):
        weights = run(made)
    assert len(caplog.messages) == 1
    choice = local(made).choice
    assert choice is not None
    for part in (f"engine: {choice}", "sequential ", "vectorised ", "ms per local step"):
        assert part in caplog.messages[0]
    by_hand = simulation(
        "algorithm=scaffold", f"engine={choice.engine}", f"workers={choice.workers}"
    )
    assert torch.equal(run(by_hand), weights), "measuring leaves no trace in the result"


@pytest.mark.parametrize("fastest", ["sequential", "vectorised"])
def test_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    """A clock that runs by the number of blocks of the other engine."""
    monkeypatch.setattr(auto, "SHORT", 0)
    clock = {"now": 0.0}
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    original = Workers.updates

    def updates(self: Any, *args: Any) -> Any:
        is_fast = type(self.engines[0]).__name__.lower() == fastest
        for item in original(self, *args):
            clock["now"] += (1 if is_fast else 3) * len(item[1].losses)
            yield item

    monkeypatch.setattr(Workers, "updates", updates)
    made = simulation()
    made.run_round()
    assert local(made).choice == Choice(fastest, 1)


def test_a_choice_that_is_set_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SHORT", 0)
    monkeypatch.setattr(auto, "candidates", lambda *_: pytest.fail("measured again"))
    made = simulation()
    assert isinstance(made.trainer, LocalTrainer)
    made.trainer.choice = Choice("vectorised", 2)
    run(made)
    assert local(made).choice == Choice("vectorised", 2)


def test_short_runs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "candidates", lambda *_: pytest.fail("measured"))
    made = simulation()
    run(made)
    assert local(made).choice == Choice("sequential", 1)


def test_candidates_use_the_cores_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def found(*changes: str, cohort: int = 10) -> list[tuple[str, int]]:
        made = simulation(*changes)
        task, data = made.task, made.data
        choices = auto.candidates(task, data, made.settings, made.algorithm, cohort)
        return [(c.engine, c.workers) for c in choices]

    both = [("sequential", 1), ("sequential", 4), ("vectorised", 4), ("vectorised", 1)]
    assert found() == both
    assert found("workers=3") == [("sequential", 3), ("vectorised", 3)]
    assert found("algorithm=prefedsync") == [("sequential", 1), ("vectorised", 1)]
    assert found(cohort=1) == [("sequential", 1)]
    assert found("model.hidden=[8000]") == both[:2], "one client fills the cache"


def test_the_command_line_shows_the_choice(tmp_path: Any) -> None:
    done = prefed_here("run", "digits-iid", "--set", "rounds=12", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ms per local step" in done.stderr


def test_channels_last_changes_neither_names_nor_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x, y = torch.randn(12, 3, 4, 4), torch.arange(12) % 2
    data = prefed.FederatedData([(x[:6], y[:6]), (x[6:], y[6:])], test=(x, y))
    task = Task(model, nn.functional.cross_entropy, data, torch.device("cpu"))
    kernel = next(task.flat.module.parameters())
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert not kernel.is_contiguous()
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), model, data, rounds=2, local_steps=2, batch_size=None,
        device="cpu",
    )  # fmt: skip
    flat = nn.utils.parameters_to_vector(result.model.parameters())
    assert torch.equal(flat, result.weights)
    exact = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), model.double(), prefed.FederatedData(
            [(x[:6].double(), y[:6]), (x[6:].double(), y[6:])]
        ), rounds=2, local_steps=2, batch_size=None, device="cpu",
    )  # fmt: skip
    torch.testing.assert_close(result.weights.double(), exact.weights, rtol=1e-4, atol=1e-5)
