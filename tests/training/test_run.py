"""The loop over rounds: how far it goes, and what state it leaves."""

from __future__ import annotations

import pytest
import torch

import prefed
from prefed.training.round import Server
from prefed.training.trainer import Arrived, Trainer
from tests.helpers.problems import tiny_data, tiny_model


def make(**options: object) -> prefed.Run:
    settings = prefed.Settings.model_validate(
        {"rounds": 4, "local_steps": 2, "batch_size": 4, "device": "cpu", **options}
    )
    return prefed.Run(prefed.PreFed(client_lr=0.01), tiny_model(), tiny_data(), settings)


def test_rounds_up_to_a_number() -> None:
    run = make()
    assert list(run.rounds(until=0)) == []
    assert [record["round"] for record in run.rounds(until=3)] == [1, 2, 3]
    assert list(run.rounds(until=3)) == []
    assert [record["round"] for record in run.rounds()] == [4]
    assert run.is_finished
    whole = make().run()
    assert torch.equal(whole.weights, run.result().weights)


def test_a_run_goes_on_where_it_was_stopped() -> None:
    class StopAfterTwo(prefed.Callback):
        def on_round(self, record: dict[str, object]) -> None:
            if record["round"] == 2:
                self.run.stop()

    run = make()
    with pytest.raises(prefed.Interrupted, match="after round 2"):
        run.run([StopAfterTwo()])
    assert run.is_whole
    other = make()
    other.restore(run.snapshot(), run.history)
    assert torch.equal(other.run().weights, make().run().weights)


def test_a_trainer_is_all_that_a_run_needs_of_where_clients_train() -> None:
    """Ten lines: every client answers with the same change."""

    class Constant(Trainer):
        def __init__(self, *parts: object) -> None:
            self.asked: list[list[int]] = []

        def train(self, server: Server, clients: list[int]) -> Arrived:
            self.asked.append(clients)
            mean = {"weights": torch.ones_like(server.weights), "buffers": server.buffers.clone()}
            return Arrived(mean, 0.5, len(clients))

    settings = prefed.Settings(rounds=3, local_steps=1, clients_per_round=2, device="cpu")
    model, data = tiny_model(), tiny_data()
    run = prefed.Run(prefed.FedAvg(), model, data, settings, make_trainer=Constant)
    before = run.server.weights.clone()
    result = run.run()
    torch.testing.assert_close(run.server.weights, before + 3)
    assert isinstance(run.trainer, Constant)
    assert run.trainer.asked == [record["cohort"] for record in result.history]
    assert [record["train_loss"] for record in result.history] == [0.5] * 3
