"""Private runs on Flower: the same mechanism as in simulation, and as Flower's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.supercore import differential_privacy as theirs
from scipy import stats

import prefed
from prefed.core.errors import PrefedError
from prefed.experiments.run_directory import execute
from prefed.flower import protocol as p
from prefed.training.accounting import Accountant
from prefed.training.ledger import FILE
from tests.helpers.federation import Federation, config_of, simulated
from tests.helpers.flower_apps import OPTIONS, run, tiny_app, tiny_grid
from tests.helpers.problems import arrays, tiny_data, tiny_model


def flat(weights: torch.Tensor) -> np.ndarray[Any, Any]:
    return weights.detach().numpy().astype(np.float64)


def test_fedavg_is_flower_s_central_dp_with_the_same_clip_and_noise() -> None:
    """Flower's own functions clip and noise the same clients' models. Without noise both are equal;
    with it, what they add is of one distribution."""
    clip, z = 0.05, 0.9
    settings: dict[str, Any] = {"rounds": 1, "local_steps": 3, "batch_size": None, "device": "cpu"}
    plain = prefed.Settings(engine="sequential", **settings)
    privacy = prefed.Privacy(noise_multiplier=z, clip=clip, sampling="fixed")
    one = prefed.Run(prefed.FedAvg(client_lr=0.5), tiny_model(), tiny_data(), plain)
    start = flat(one.server.weights).copy()
    one.prepare()
    models = []
    for update in one.trainer._updates(one.server, [*range(6)], lambda _, u: u):  # type: ignore[attr-defined]
        models += [[start + row] for row in flat(update.values["weights"])]
    for model in models:
        theirs.compute_clip_model_update(model, [start], clip)
    mean = np.mean([model[0] for model in models], axis=0)

    private = prefed.Settings(engine="sequential", privacy=privacy, **settings)
    other = prefed.Run(prefed.FedAvg(client_lr=0.5), tiny_model(), tiny_data(), private)
    other.prepare()
    arrived, mechanism = other.trainer.train(other.server, [*range(6)]), other.mechanism
    assert mechanism is not None
    ours, flower = [], []
    for seed in range(100):
        mechanism.seed = seed
        released = mechanism.release(other.server, arrived.mean, 6, 6)
        ours.append(start + flat(released["weights"]) - mean)
        np.random.seed(seed)
        noised = [mean.copy()]
        theirs.add_gaussian_noise_inplace(noised, theirs.compute_stdv(z, clip, 6))
        flower.append(noised[0] - mean)
    a, b = np.concatenate(ours), np.concatenate(flower)
    deviation = z * clip / 6
    for sample in (a, b):
        assert abs(sample.mean()) < 4 * deviation / math.sqrt(len(sample))
        assert abs(sample.std() / deviation - 1) < 4 / math.sqrt(2 * len(sample))
    assert stats.ks_2samp(a, b).pvalue > 0.001
    assert stats.kstest(a / deviation, "norm").pvalue > 0.001


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "prefed", "client_lr": 0.01}, {"name": "fedadam"}, {"name": "scaffold"}],
)
def test_a_deployment_clips_as_a_simulation_does(algorithm: dict[str, Any], tmp_path: Path) -> None:
    """Their noise differs, as it must, and is so little here that the rest can be compared."""
    fields = {"prefed": {"m": 0.001, "P": 0.001}, "scaffold": {"c": 0.01}}.get(algorithm["name"])
    privacy = {"noise_multiplier": 1e-4, "clip": 0.02, "sampling": "fixed"}
    privacy["state_clip"] = fields or {}
    config = config_of(algorithm, privacy=privacy, rounds=2, clients_per_round="all")
    made = Federation(config, tmp_path).run()
    wanted = simulated(config)
    assert made.mechanism is not None
    assert made.mechanism.secret
    scale = float((wanted.server.weights - config.make_run().server.weights).norm())
    apart = float((made.server.weights - wanted.server.weights).norm())
    assert 0 < apart < 2e-2 * scale
    for a, b in zip(made.history, wanted.history, strict=True):
        assert a["epsilon"] == b["epsilon"]
        assert math.isnan(a["train_loss"])


def test_a_deployment_has_a_ledger_and_ends_by_its_budget(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 4.0, "epsilon": 2.0, "sampling": "fixed"}
    config = config_of({"name": "fedavg"}, privacy=privacy, rounds=20)
    there = Federation(config, tmp_path / "app")
    result = execute(there.deployment(), tmp_path / "run")
    count = Accountant("rdp", "fixed", "add-remove", 1e-5, 9, 4)
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert len(lines) == len(result.history)
    assert count.epsilon(4.0, len(lines)) <= 2.0 < count.epsilon(4.0, len(lines) + 1)
    assert "budget" in result.ended


def test_clients_that_trust_nobody_noise_what_leaves_them(tmp_path: Path) -> None:
    """What a node sends is noise, and says nothing of its loss."""
    sent: list[np.ndarray[Any, Any]] = []
    losses: list[Any] = []

    def look(node: int, message: Message, reply: Message) -> Message:
        for key, record in reply.content.array_records.items():
            if key.startswith(p.update_key(0)[:-1]):
                sent.append(record["weights/values"].numpy().ravel())
        losses.extend(r[p.LOSS] for r in reply.content.metric_records.values() if p.LOSS in r)
        return reply

    privacy = {"noise_multiplier": 30.0, "clip": 0.01, "where": "client", "sampling": "fixed"}
    config = config_of({"name": "fedavg"}, privacy=privacy, rounds=1)
    made = Federation(config, tmp_path, tamper=look).run()
    assert len(sent) == 4
    assert {*losses} == {0.0}
    for values in sent:
        assert float(values.std()) == pytest.approx(0.3, rel=0.2)
    total = np.sum(sent, axis=0) / 4
    start = config.make_run().server.weights
    moved = (made.server.weights - start).numpy()
    np.testing.assert_allclose(moved, total, atol=1e-5)
    count = Accountant("rdp", "none", "replace", 1e-5, 9, 4)
    assert made.history[0]["epsilon"] == count.epsilon(30.0, 1)


def test_a_drop_in_strategy_takes_the_same_privacy(tmp_path: Path) -> None:
    privacy = prefed.Privacy(noise_multiplier=1.0, sampling="fixed", clip=1e-7, epsilon=8.0)
    options = {**OPTIONS, "weighting": "uniform"}
    strategy = prefed.flower.PreFedOpt(per_step=False, privacy=privacy, **options)
    with pytest.raises(PrivacyBudgetExhausted, match="budget of epsilon = 8"):
        run(strategy, tiny_grid(tiny_app(arrays()), tmp_path), 50)
    assert strategy.mechanism is not None
    spent = strategy.mechanism.ledger.count(1000)
    count = Accountant("rdp", "fixed", "add-remove", 1e-5, 6, 6)
    assert count.epsilon(1.0, spent) <= 8.0 < count.epsilon(1.0, spent + 1)
    assert strategy.server is not None
    assert strategy.server.round == spent
    with pytest.raises(PrefedError, match="amplifies nothing"):
        prefed.flower.FedAvg(privacy=prefed.Privacy(noise_multiplier=1.0), **options)
    with pytest.raises(PrefedError, match="uniform"):
        prefed.flower.FedAvg(privacy=privacy, **{**OPTIONS, "weighting": "samples"})


def test_a_drop_in_strategy_whose_clients_share_state(tmp_path: Path) -> None:
    """Which Flower's wrappers cannot take. Its noise is little here, its clips as in simulation."""
    privacy = prefed.Privacy(
        noise_multiplier=1e-4, sampling="fixed", clip=0.02, state_clip={"m": 0.01, "P": 0.01}
    )
    options = {**OPTIONS, "weighting": "uniform"}
    strategy = prefed.flower.PreFed(client_lr=0.01, privacy=privacy, **options)
    run(strategy, tiny_grid(tiny_app(arrays(), "local_train"), tmp_path), 2)
    result = prefed.simulate(
        prefed.PreFed(client_lr=0.01), tiny_model(), tiny_data(), rounds=2, local_steps=3,
        batch_size=None, device="cpu", engine="sequential", privacy=privacy,
    )  # fmt: skip
    assert strategy.server is not None
    moved = float((result.weights - flat_weights()).norm())
    apart = float((strategy.server.weights - result.weights).norm())
    assert 0 < apart < 1e-2 * moved
    for name in ("m", "P"):
        wanted = result.server.shared[name]
        torch.testing.assert_close(strategy.server.shared[name], wanted, rtol=0.3, atol=1e-4)


def flat_weights() -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in tiny_model().parameters()])
