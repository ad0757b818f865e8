"""Early ends and best models: against plain loops over the records of a run without them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import prefed
from prefed.training.goals import Best, Goal, Stopper, StopWhen
from tests.helpers.problems import tiny_data, tiny_model
from tests.training.test_callbacks import Recorder

ROUNDS = 25


def run(rounds: int = ROUNDS, **more: Any) -> prefed.Result:
    return prefed.simulate(
        prefed.FedAvg(client_lr=0.3), tiny_model(), tiny_data(), rounds=rounds, local_steps=3,
        batch_size=3, device="cpu", **more,
    )  # fmt: skip


@cache
def weights_after(rounds: int) -> torch.Tensor:
    return run(rounds).weights


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    return run().history


def waited(values: list[float], patience: int, min_delta: float) -> int:
    """The round in which patience ends, by the textbook."""
    best, since = -float("inf"), 0
    for round, value in enumerate(values, 1):
        if value > best + min_delta:
            best, since = value, 0
        else:
            since += 1
        if since == patience:
            return round
    return len(values)


@pytest.mark.parametrize("patience", [1, 2, 4, 100])
@pytest.mark.parametrize("min_delta", [0.0, 0.05])
@pytest.mark.parametrize("metric", ["test_accuracy", "test_loss", "train_loss"])
def test_patience(
    patience: int, min_delta: float, metric: str, whole: list[dict[str, Any]]
) -> None:
    sign = 1 if metric == "test_accuracy" else -1
    wanted = waited([sign * r[metric] for r in whole], patience, min_delta)
    recorder = Recorder()
    stop = {"metric": metric, "patience": patience, "min_delta": min_delta}
    result = run(stop_when=stop, callbacks=[recorder])
    assert len(result.history) == wanted
    assert recorder.seen[-1] == "end"
    assert "stop" not in recorder.seen
    assert bool(result.ended) == (wanted < ROUNDS)
    if wanted < ROUNDS:
        assert f"{metric} has not become better" in result.ended
    assert torch.equal(result.weights, weights_after(wanted))


@pytest.mark.parametrize(
    ("stop_when", "is_over"),
    [
        ("test_accuracy >= 0.5", lambda r: r["test_accuracy"] >= 0.5),
        ("test_loss <= 1.05", lambda r: r["test_loss"] <= 1.05),
        ({"metric": "test_loss", "target": 1.05}, lambda r: r["test_loss"] <= 1.05),
        ({"target": 0.5}, lambda r: r["test_accuracy"] >= 0.5),
        (lambda r: r["train_loss"] < 1.0, lambda r: r["train_loss"] < 1.0),
    ],
)
def test_targets(stop_when: Any, is_over: Any, whole: list[dict[str, Any]]) -> None:
    wanted = next(r["round"] for r in whole if is_over(r))
    assert 1 < wanted < ROUNDS
    result = run(stop_when=stop_when)
    assert len(result.history) == wanted
    assert result.ended


def test_the_last_round_is_evaluated_also_if_the_end_comes_early(
    whole: list[dict[str, Any]],
) -> None:
    result = run(stop_when=lambda record: record["round"] == 5, evaluate_every=3)
    assert [r["test_loss"] is not None for r in result.history] == [False, False, True, False, True]
    assert result.history[-1]["test_loss"] == whole[4]["test_loss"]


def test_a_target_that_is_reached_in_the_last_round_is_no_early_end() -> None:
    assert run(3, stop_when=lambda record: record["round"] == 3).ended == ""


def test_patience_counts_evaluations(whole: list[dict[str, Any]]) -> None:
    values = [r["test_accuracy"] for r in whole if r["round"] % 2 == 0]
    result = run(stop_when={"patience": 2}, evaluate_every=2)
    assert len(result.history) == 2 * waited(values, 2, 0)


@pytest.mark.parametrize(
    ("keep", "key", "sign"),
    [
        ("best", "test_accuracy", 1),
        ("best test_loss", "test_loss", -1),
        ("lowest test_accuracy", "test_accuracy", -1),
        ("best test_f1", "test_f1", 1),
    ],
)
def test_the_best_model(keep: str, key: str, sign: int) -> None:
    result = run(keep=keep, metrics=["f1"])
    values = [sign * r[key] for r in result.history]
    best = values.index(max(values)) + 1
    assert result.best_round == best
    assert best < ROUNDS, "a problem whose last model is not the best"
    assert torch.equal(result.weights, run(best).weights)
    assert torch.equal(torch.cat([p.flatten() for p in result.model.parameters()]), result.weights)
    assert not torch.equal(result.weights, result.server.weights)
    assert torch.equal(result.server.weights, run().weights)


def test_the_best_model_has_its_own_buffers() -> None:
    def make(rounds: int, **more: Any) -> prefed.Result:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4),
                                        torch.nn.Linear(4, 3)).double()  # fmt: skip
        return prefed.simulate(
            prefed.FedAvg(client_lr=0.3), model, tiny_data(), rounds=rounds, local_steps=3,
            batch_size=3, device="cpu", **more,
        )  # fmt: skip

    kept = make(12, keep="best")
    assert kept.best_round is not None
    assert kept.best_round < 12
    wanted = make(kept.best_round).model.state_dict()
    assert all(torch.equal(wanted[name], value) for name, value in kept.model.state_dict().items())


def test_what_should_fall() -> None:
    falling = ["train_loss", "test_perplexity", "client_loss_worst_tenth", "client_accuracy_std"]
    assert all(Goal(key).sign == -1 for key in falling)
    assert all(Goal(key).sign == 1 for key in ("test_f1", "client_accuracy_worst_tenth"))


def test_values_that_are_missing_or_not_numbers() -> None:
    goal = Goal("highest x")
    goal.resolve("keep", ["x"])
    best = Best(goal)
    values = [None, float("nan"), 1.0, None, float("nan"), 1.0, 2.0]
    seen = [best.see({"round": i, "x": v}) for i, v in enumerate(values)]
    assert seen == [False, False, True, False, False, False, True]
    stopper = Stopper(StopWhen(metric="x", patience=2), ["x"])
    reasons = [stopper.see({"round": i, "x": v}) for i, v in enumerate(values[:6], 1)]
    assert reasons[:5] == [""] * 5
    assert reasons[5] == "x has not become better since round 3 (1)"


def test_a_callback_may_look_at_the_model_and_stop_the_run() -> None:
    class Watch(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            model = self.run.model()
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert torch.equal(weights, self.run.server.weights)
            with torch.no_grad():
                next(model.parameters()).zero_()  # a copy: the run goes on as it was
            if record["round"] == 3:
                self.run.stop()

    watch = Watch()
    with pytest.raises(prefed.Interrupted):
        run(callbacks=[watch])
    assert torch.equal(watch.run.server.weights, run(3).weights)
    assert torch.equal(watch.run.run().server.weights, run().server.weights)  # it may go on


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": "best test_f1"}, "keep: no round has a number 'test_f1'"),
        ({"keep": "best of all"}, 'keep: should be "best", or such as'),
        ({"stop_when": {}}, "stop_when: needs a patience or a target"),
        ({"stop_when": "soon"}, 'stop_when: should be such as {"patience": 10}'),
        ({"stop_when": 3}, 'stop_when: should be such as {"patience": 10}'),
        ({"stop_when": {"patience": 0}}, "stop_when.patience: should be greater than 0"),
        (
            {"stop_when": {"patienc": 1}},
            'stop_when.patienc: unknown option; did you mean "patience',
        ),
        ({"stop_when": "test_f1 >= 1"}, "stop_when.metric: no round has a number 'test_f1'"),
        ({"stop_when": "test_loss >= x"}, "stop_when.target: should be a valid number"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(prefed.PrefedError) as caught:
        run(**settings)
    assert words in str(caught.value)


def test_without_a_test_set_a_key_must_be_named() -> None:
    data = prefed.FederatedData(tiny_data().clients)
    rest: dict[str, Any] = {"rounds": 4, "local_steps": 1, "device": "cpu"}
    with pytest.raises(prefed.PrefedError, match="keep: there is no test set"):
        prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), data, keep="best", **rest)
    kept = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), tiny_model(), data, keep="best train_loss", **rest
    )
    losses = [record["train_loss"] for record in kept.history]
    assert kept.best_round == losses.index(min(losses)) + 1
