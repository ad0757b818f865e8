"""engine = "auto", and what stands around it."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import prefed
from prefed.core import c_programs, machine
from prefed.experiments.config import load
from prefed.training.engines import auto
from prefed.training.engines.auto import Choice
from prefed.training.engines.vectorised import Vectorised, VectorisedBlock
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


@pytest.mark.process
@pytest.mark.parametrize("fastest", ["sequential", "vectorised", "native"])
def test_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    """A clock that runs by the number of blocks of the other engines."""
    monkeypatch.setattr(auto, "SHORT", 0)
    clock = {"now": 0.0}
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    original = Workers.updates

    def updates(self: Any, *args: Any) -> Any:
        is_fast = type(self.engines[0]).__name__.lower() == fastest
        for item in original(self, *args):
            clock["now"] += (1 if is_fast else 3) * len(getattr(item[1], "losses", ()))
            yield item

    monkeypatch.setattr(Workers, "updates", updates)
    made = simulation()
    made.run_round()
    assert local(made).choice == Choice(fastest, 1)


def test_short_runs_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SHORT", 0)
    monkeypatch.setattr(c_programs, "compile_anew", lambda *_: pytest.fail("compiled"))
    run(simulation())


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
    monkeypatch.setattr(auto, "usable_threads", lambda: 4)

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


class Watched(nn.Linear):
    """Notes how many threads torch computes with, in training and in evaluation."""

    seen: ClassVar[set[tuple[bool, int]]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((self.training, torch.get_num_threads()))
        return super().forward(x)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("large", [False, True])
def test_small_models_compute_with_one_thread_and_large_ones_with_all(
    monkeypatch: pytest.MonkeyPatch, engine: str, large: bool
) -> None:
    monkeypatch.setattr(machine, "LARGE", 0 if large else machine.LARGE)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    data = prefed.FederatedData([(x, y)], test=(x, y))
    settings = prefed.Settings(rounds=2, local_steps=2, engine=engine, device="cpu")
    with machine.torch_threads(2):
        made = prefed.Run(prefed.FedAvg(client_lr=0.1), Watched(4, 2), data, settings)
        made.prepare()
        Watched.seen.clear()
        made.run()
        assert torch.get_num_threads() == 2, "the caller's threads are as they were"
    wanted = 2 if large else 1
    assert Watched.seen == {(True, wanted), (False, wanted)}
    assert made.trainer.engine == f"sequential x 1 with {wanted} thread{'s' * large}"


def test_a_run_of_an_earlier_version_goes_on_with_the_threads_it_had() -> None:
    assert Choice.parse("sequential x 1") == Choice("sequential", 1, None)
    for choice in (Choice("sequential", 1, 4), Choice("vectorised", 2), Choice("own:E", 1, None)):
        assert Choice.parse(str(choice)) == choice
    for text in ("vectorised x -1", "vectorised x 0", "sequential x 1 with 0 threads", "a x 99999"):
        with pytest.raises(ValueError, match="no engine"):
            Choice.parse(text)


def test_a_checkpoint_does_not_name_an_engine_of_its_own() -> None:
    made = simulation()
    for engine in ("os:system x 1", "compiled x 1"):
        with pytest.raises(ValueError, match="is not its engine"):
            made.restore(made.snapshot(), [], engine)
    made.restore(made.snapshot(), [], "vectorised x 1")


def test_a_hopeless_candidate_is_dropped_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which a block of the vectorised engine takes a hundred times as long."""
    monkeypatch.setattr(auto, "SHORT", 0)
    monkeypatch.setattr(auto, "WORTH_COMPILING", math.inf)
    monkeypatch.setattr(auto, "BLOCKS", 10)
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.setattr(Vectorised, "block_size", lambda *_: 1)
    clock, blocks = {"now": 0.0}, {"Sequential": 0, "Vectorised": 0}
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    original = Workers.updates

    def updates(self: Any, *args: Any) -> Any:
        name = type(self.engines[0]).__name__
        for item in original(self, *args):
            clock["now"] += 1 if name == "Sequential" else 100
            blocks[name] += 1
            yield item

    monkeypatch.setattr(Workers, "updates", updates)
    made = simulation("clients_per_round=10")
    made.prepare()
    assert local(made).choice == Choice("sequential", 1)
    assert blocks["Vectorised"] <= 2, "one block each time it was tried"


def test_a_hopeless_candidate_is_dropped_inside_a_local_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock by which a step of a client takes a hundred times as long vectorised."""
    monkeypatch.setattr(auto, "SHORT", 0)
    monkeypatch.setattr(auto, "WORTH_COMPILING", math.inf)
    monkeypatch.setattr(auto, "STEPS", 20)
    monkeypatch.setattr(machine, "cores", lambda: 1)
    clock, steps = {"now": 0.0}, [0]
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    alone, together = Task.gradient, VectorisedBlock.differentiate

    def gradient(self: Task, *args: Any) -> torch.Tensor:
        clock["now"] += 1
        return alone(self, *args)

    def differentiate(self: VectorisedBlock, k: int) -> torch.Tensor:
        clock["now"] += 100 * len(self.clients)
        steps[0] += 1
        return together(self, k)

    monkeypatch.setattr(Task, "gradient", gradient)
    monkeypatch.setattr(VectorisedBlock, "differentiate", differentiate)
    made = simulation("clients_per_round=10", "local_steps=20")
    made.prepare()
    assert local(made).choice == Choice("sequential", 1)
    assert steps[0] <= 3, "one to see whether the engine can, and one each time it was tried"


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


def test_operations_of_a_forward_pass() -> None:
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4) % 2
    data = prefed.FederatedData([(x, y)])
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(5 * 64, 2, bias=False)
    )
    task = Task(model, None, data, torch.device("cpu"))
    assert task.operations(data) == 2 * (3 * 9) * (5 * 64) + 2 * (5 * 64) * 2


def test_a_parameter_may_be_one_number() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    data = prefed.FederatedData([(torch.randn(4, 5), torch.arange(4) % 3)])
    task = Task(Scaled(), None, data, torch.device("cpu"))
    assert task.operations(data) == 2 * (5 * 3) + 2 * 3 + 2 * 3  # weight, bias, scale
