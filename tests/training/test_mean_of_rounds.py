"""The mean of the global weights over rounds: what is evaluated and handed over, and that clients
do not notice. Its arithmetic is in tests/algorithms/test_oracles.py."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import prefed
from prefed.core.layout import Layout
from prefed.experiments.config import load
from prefed.training.round import Server, server_update
from tests.helpers.device import DEVICE
from tests.helpers.engine_runs import batchnorm, chain
from tests.helpers.oracles.algorithms import mean_of_rounds
from tests.helpers.problems import tiny_data

SETTINGS: dict[str, Any] = {
    "rounds": 5, "local_steps": 3, "batch_size": 4, "clients_per_round": 4, "device": DEVICE,
}  # fmt: skip


def make_run(
    r: float | None, model: Any = chain, data: Any = None, lr: float = 0.1, **more: Any
) -> prefed.Run:
    algorithm = prefed.FedAvgM(client_lr=lr, mean_of_rounds=r)
    settings = prefed.Settings(**SETTINGS | more)
    return prefed.Run(algorithm, model(), data or tiny_data(), settings)


def seen(run: prefed.Run) -> tuple[list[Any], list[Any]]:
    """The weights and statistics that clients go on from, after each round."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for _ in run.rounds():
        for values, value in zip(found, (run.server.weights, run.server.buffers), strict=True):
            values.append(value.cpu().numpy().copy())
    return found


@pytest.mark.parametrize("r", [0.0, 4.0])
def test_the_model_is_the_mean_and_clients_do_not_notice(r: float) -> None:
    plain, meant = make_run(None, batchnorm), make_run(r, batchnorm)
    weights, statistics = seen(meant)
    for one, other in zip(seen(plain), (weights, statistics), strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a == b).all()
    shown = ("train_loss", "bytes_up", "bytes_down")
    for a, b in zip(plain.history, meant.history, strict=True):
        assert {k: a[k] for k in shown} == {k: b[k] for k in shown}
    result = meant.result()
    torch.testing.assert_close(result.weights.cpu(), torch.from_numpy(mean_of_rounds(weights, r)))
    assert not torch.equal(result.weights, plain.result().weights)
    held = meant.task.flat.read_buffers().cpu()
    torch.testing.assert_close(held, torch.from_numpy(mean_of_rounds(statistics, r)))


def test_evaluation_and_the_best_model_are_of_the_mean() -> None:
    data = tiny_data()
    assert data.test is not None
    test = data.test.all()
    run = make_run(1.0, data=data, lr=3.0, keep="test_loss", evaluate_every=1)
    assert run.best is not None
    found = {}
    for record in run.rounds():
        model = run.model()
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(test[0].to(DEVICE)), test[1].to(DEVICE))
        assert record["test_loss"] == pytest.approx(float(loss), abs=1e-9)
        found[run.server.round] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    result = run.result()
    assert run.best.round < 5  # so that it is not that of now
    assert torch.equal(result.weights, found[run.best.round])


def test_resumed_to_the_same_bits(tmp_path: Path) -> None:
    def go(rounds: int, resume: bool = False) -> prefed.Result:
        algorithm = prefed.PreFedMLite(client_lr=0.01)
        settings = SETTINGS | {"rounds": rounds}
        return prefed.simulate(
            algorithm, chain(), tiny_data(), out=tmp_path / "run", resume=resume, **settings
        )

    whole = prefed.simulate(prefed.PreFedMLite(client_lr=0.01), chain(), tiny_data(), **SETTINGS)
    go(3)
    assert torch.equal(go(5, resume=True).weights, whole.weights)


@pytest.mark.parametrize("finetune", [None, 2])
def test_clients_are_evaluated_with_the_mean(finetune: int | None) -> None:
    run = make_run(2.0, data=tiny_data().hold_out(0.3), finetune_steps=finetune)
    [*_, record] = run.rounds()
    means, weights = run.server.over_rounds, run.server.weights.clone()
    run.server.over_rounds = {}
    assert run.client_evaluation is not None
    assert run.client_evaluation.evaluate()["client_losses"] != record["client_losses"]
    run.server.weights.copy_(means["weights"])  # as if that were what clients go on from
    assert run.client_evaluation.evaluate()["client_losses"] == record["client_losses"]
    run.server.weights.copy_(weights)


def test_rounds_without_a_step_do_not_count() -> None:
    """Of six rounds those with too few answers leave the model as it was, and the mean."""
    run = make_run(0.0, rounds=6, client_dropout=0.5, quorum=3, clients_per_round=4)
    weights, _ = seen(run)
    skipped = ["skipped" in record for record in run.history]
    assert {*skipped} == {False, True}
    stepped = [w for w, not_counted in zip(weights, skipped, strict=True) if not not_counted]
    found = run.result().weights.cpu()
    torch.testing.assert_close(found, torch.from_numpy(mean_of_rounds(stepped, 0.0)))


def test_the_mean_of_half_precision_weights_does_not_stand_still() -> None:
    algorithm = prefed.FedAvg(mean_of_rounds=0.0)
    layout = Layout.of([("w", torch.zeros(3))])
    first = torch.zeros(3, dtype=torch.bfloat16)
    server = Server.start(algorithm, layout, first, first[:0])
    for _ in range(256):  # 1/256, 2/256, ..., which bfloat16 has
        mean = {"weights": torch.full((3,), 1 / 256, dtype=torch.bfloat16)}
        server_update(algorithm, server, mean, 1, 1.0)
    assert server.weights.tolist() == [1.0] * 3
    weights, _ = server.model()
    assert weights.dtype == torch.bfloat16
    assert weights.tolist() == pytest.approx([257 / 512] * 3, rel=1 / 256)


def test_none_survives_a_config(tmp_path: Path) -> None:
    """PreFedM is the one whose defaults are not None."""
    algorithm = prefed.PreFedM(mean_of_rounds=None, tau_relative=None)
    assert prefed.PreFedM(**algorithm.model_dump()) == algorithm
    changes = ["algorithm=prefedm", "mean_of_rounds=none", "rounds=1"]
    config = load("digits-noniid", changes)
    again = load(config.to_dict())
    assert again.make_algorithm().mean_of_rounds is None
    assert again.make_algorithm().model_dump()["tau_relative"] == 0.1
    prefed.simulate(algorithm, chain(), tiny_data(), out=tmp_path / "run", **SETTINGS)
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["algorithm"]
    assert written["mean_of_rounds"] == written["tau_relative"] == "none"
    assert "mean_of_rounds" not in prefed.FedAvg().model_dump()
