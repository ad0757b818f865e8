"""Clients of a deployed config evaluated on their nodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, MetricRecord

from prefed.core.errors import Interrupted
from prefed.experiments.run_directory import execute
from prefed.experiments.stored_runs import load_run
from prefed.flower import protocol as p
from prefed.flower.client import client_app
from prefed.flower.server import run
from tests.helpers.federation import (
    CONFIG,
    Federation,
    config_of,
    simulated,
    told_by_all,
)
from tests.helpers.loopback import Tamper

WITH_STATISTICS = {"name": "resnet8", "width": 2, "norm": "batch"}
HELD_OUT = {**CONFIG["data"], "client_test": 0.3}  # type: ignore[dict-item]


def with_tests(algorithm: dict[str, Any], **changes: Any) -> Any:
    return config_of(algorithm, **{"data": HELD_OUT, **changes})


@pytest.mark.parametrize("changes", [
    {}, {"finetune_steps": 2}, {"evaluate_clients": 4, "evaluate_clients_every": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("algorithm", [
    {"name": "prefed"}, {"name": "prefed", "upload": "topk(0.1)", "momentum": "keep"},
    {"name": "fedbn"}, {"name": "fedrep", "personal": ["@last"]},
    {"name": "fedavg", "statistics": "keep"},
], ids=str)  # fmt: skip
def test_the_same_records_as_in_simulation(
    algorithm: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    if algorithm["name"] != "prefed":
        changes = changes | {"model": WITH_STATISTICS}
    config = with_tests(algorithm, rounds=3, **changes)
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)
    assert len(there.history[-1]["client_accuracies"]) == changes.get("evaluate_clients", 9)
    assert ("client_losses" in there.history[0]) == ("evaluate_clients" not in changes)


def evaluations(tamper: Tamper) -> Tamper:
    """Tamper with the replies to evaluations alone."""

    def only(node: int, message: Message, reply: Message) -> Message | None:
        asked = message.metadata.message_type == MessageType.EVALUATE
        return tamper(node, message, reply) if asked else reply

    return only


@pytest.mark.parametrize(("steps", "names"), [(None, set()), (1, {"P", "m"})])
def test_the_state_of_the_optimiser_goes_down_only_if_clients_make_steps(
    steps: int | None, names: set[str], tmp_path: Path
) -> None:
    sent: list[set[str]] = []

    def listen(node: int, message: Message, reply: Message) -> Message:
        sent.append({*message.content[p.SERVER]})
        return reply

    config = with_tests({"name": "prefed"}, rounds=1, finetune_steps=steps)
    Federation(config, tmp_path, tamper=evaluations(listen)).run()
    assert sent == [names | {"weights", "buffers"}] * 3


def test_clients_of_whose_targets_none_counts(tmp_path: Path) -> None:
    """Of ten clients with a digit each, one has zeros alone, which are ignored."""
    split = {"name": "shards", "clients": 10, "classes_per_client": 1}
    data = {"name": "digits", "split": split, "client_test": 0.2}
    loss = {"name": "cross_entropy", "ignore_index": 0}
    config = config_of({"name": "fedavg"}, data=data, loss=loss, rounds=1)
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert told_by_all(here.history[0]) == told_by_all(there.history[0])
    assert 8 <= len(there.history[0]["evaluated_clients"]) < 10


def test_targets_without_an_accuracy(tmp_path: Path) -> None:
    data = {**HELD_OUT, "target": "input"}
    config = config_of({"name": "fedavg"}, data=data, model={"name": "autoencoder"}, rounds=1)
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert told_by_all(here.history[0]) == told_by_all(there.history[0])
    assert "client_accuracies" not in there.history[0]
    assert len(there.history[0]["client_losses"]) == 9


HOSTILE: dict[str, dict[str, Any]] = {
    "a loss of nan": {p.EVALUATION_LOSS: math.nan},
    "a loss of -inf": {p.EVALUATION_LOSS: -math.inf},
    "a loss of 1": {p.EVALUATION_LOSS: 1},
    "a loss of None": {p.EVALUATION_LOSS: None},
    "an accuracy of nan": {p.ACCURACY: math.nan},
    "an accuracy of 1.5": {p.ACCURACY: 1.5},
    "an accuracy of -0.5": {p.ACCURACY: -0.5},
    "an accuracy of [0.5, 0.5]": {p.ACCURACY: [0.5, 0.5]},
    "an accuracy of None": {p.ACCURACY: None},
    "a sample count of 1000; it has": {p.SAMPLES: 1000},
    "a sample count of 0": {p.SAMPLES: 0},
    "it is of round 7, not 1": {p.ROUND: 7},
    "it speaks for client 5": {p.CLIENT: 5},
    "it has no metrics": {},
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_refused_score_is_as_if_its_client_were_not_there(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = 4

    @evaluations
    def lie(node: int, message: Message, reply: Message) -> Message:
        if (key := p.about_key(victim)) in reply.content:
            about = {**reply.content[key], **HOSTILE[reason]}
            kept = {name: value for name, value in about.items() if value is not None}
            reply.content[key] = MetricRecord(kept)
            if not HOSTILE[reason]:
                del reply.content[key]
        return reply

    config = with_tests({"name": "fedavg"}, rounds=1)
    with caplog.at_level("WARNING", logger="flwr"):
        record = Federation(config, tmp_path, tamper=lie).run().history[0]
    whole = simulated(config).history[0]
    others = [c for c in range(9) if c != victim]
    assert record["evaluated_clients"] == others
    for kind in ("accuracies", "losses"):
        assert record[f"client_{kind}"] == [whole[f"client_{kind}"][c] for c in others]
    mean = sum(record["client_losses"]) / 8
    assert record["client_loss_mean"] == mean
    assert f"round 1, client {victim} is not evaluated: {reason}" in caplog.text


def test_an_accuracy_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    @evaluations
    def lie(node: int, message: Message, reply: Message) -> Message:
        if p.about_key(2) in reply.content:
            cast(MetricRecord, reply.content[p.about_key(2)])[p.ACCURACY] = 0.5
        return reply

    data = {**HELD_OUT, "target": "input"}
    config = config_of({"name": "fedavg"}, data=data, model={"name": "autoencoder"}, rounds=1)
    record = Federation(config, tmp_path, tamper=lie).run().history[0]
    assert record["evaluated_clients"] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert "client_accuracies" not in record


def test_a_run_outlives_an_evaluation_that_nobody_answers(tmp_path: Path) -> None:
    config = with_tests({"name": "fedavg"}, rounds=2, keep="best client_accuracy_mean")
    silent = evaluations(lambda node, message, reply: None)
    there = Federation(config, tmp_path, tamper=silent, round_seconds=0.5).run()
    assert torch.equal(there.server.weights, simulated(config).server.weights)
    assert [r["evaluated_clients"] for r in there.history] == [[], []]
    assert "client_accuracy_mean" not in there.history[0]
    assert there.best is not None
    assert there.best.round == 0


def test_samples_that_only_nodes_have(tmp_path: Path) -> None:
    """A share of a node's own samples is held out from its training, and evaluated on."""
    config = with_tests({"name": "fedavg"}, rounds=1, clients_per_round=9, evaluate_clients=5)
    federation = Federation(config, tmp_path)
    counts: list[int] = []

    def listen(node: int, message: Message, reply: Message) -> Message:
        counts.extend(cast(Any, r[p.SAMPLES]) for r in reply.content.metric_records.values())
        return reply

    def own(context: Context) -> Any:
        draw = np.random.default_rng(int(context.node_config[p.PARTITION]))
        x = draw.integers(0, 17, (20, 64)).astype(np.float32)
        return x, draw.integers(0, 10, 20)

    federation.grid.tamper = listen
    federation.grid.nodes = {
        number: (client_app(federation.path, own), place)
        for number, (_, place) in federation.grid.nodes.items()
    }
    options = federation.options.to_run_config() | {"run-dir": str(tmp_path / "run")}
    run(federation.path.read_text(), federation.grid, options, own_data=True)
    assert sorted(n for n in counts if n) == [6] * 5 + [14] * 9
    record = load_run(tmp_path / "run").history[0]
    assert len(record["client_accuracies"]) == len(record["evaluated_clients"]) == 5


def test_the_best_model_and_resume(tmp_path: Path) -> None:
    """Stopped after two rounds and resumed, with personal parts on the nodes' disks, a run on
    Flower ends in what a simulation has; the best model is by the clients' own accuracy."""
    config = with_tests(
        {"name": "fedper"}, clients_per_round=9, keep="best client_accuracy_worst_tenth"
    )
    folder = tmp_path / "run"
    federation = Federation(config, tmp_path)
    options = federation.options.to_run_config() | {"run-dir": str(folder)}
    asked: list[int] = []

    def listen(node: int, message: Message, reply: Message) -> Message:
        asked.append(cast(Any, message.content[p.ASK][p.ROUND]))
        if asked.count(2) == 1 and len(asked) == 4:
            raise KeyboardInterrupt
        return reply

    first = Federation(config, tmp_path, tamper=evaluations(listen))
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        run(first.path.read_text(), first.grid, options)
    assert len(load_run(folder).history) == 1, "the second was stopped in its evaluation"
    run(federation.path.read_text(), federation.grid, options | {"resume": True})
    execute(config, tmp_path / "here")
    ours, theirs = load_run(tmp_path / "here"), load_run(folder)
    assert [told_by_all(r) for r in ours.history] == [told_by_all(r) for r in theirs.history]
