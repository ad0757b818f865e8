"""Deployed configs in one process: the apps, the messages and the trust, without the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from flwr.app import Message

from prefed.core.errors import Diverged, PrefedError, RunFailed
from prefed.experiments.stored_runs import load_run
from prefed.flower import protocol as p
from prefed.flower.client import client_app
from prefed.flower.local_deployment import check_folder
from prefed.flower.server import FlowerTrainer, run
from prefed.training.kept import InMemory
from tests.helpers.federation import (
    HOSTILE,
    Federation,
    config_of,
    poison,
    simulated,
    told_by_all,
    without,
)
from tests.helpers.problems import WITHOUT_NORMS, local

ON_FLOWER = [n for n in WITHOUT_NORMS if n != "prefedsync"]
VARIANTS: list[dict[str, Any]] = [
    *({"name": name} for name in ON_FLOWER),
    {"name": "prefed", "momentum": "keep"},
    {"name": "prefed", "momentum": "reset"},
    {"name": "prefed", "bias_correction": True},
    *({"name": "fedavg", "upload": u} for u in ("bfloat16", "float8", "int8", "topk(0.1)")),
    *({"name": "prefed", "P_codec": c} for c in ("float16", "log8", "log4", "row", "tensor")),
    {"name": "prefed", "P_every": 3, "momentum": "derived", "aggregate": "sqrtP"},
    {"name": "prefed", "shape": "kronecker", "refresh": 2},
    {"name": "fedavg", "align": 0.3},
    {"name": "fedpac", "rule": "sophia"},
    {"name": "mimelite", "optimiser": "adam"},
    {"name": "fedmuon", "momentum": "average", "align": 0.5, "align_form": "mixed"},
    {"name": "pair", "client": {"name": "adam", "bias_correction": True}, "server": "yogi",
     "server_lr": 0.01, "share": {"m": "keep", "v": {"kind": "average", "codec": "log8"}}},
    {"name": "prefed", "align": 0.3, "align_form": "mixed", "decoupled_weight_decay": 0.1},
    {"name": "pair", "client": {"name": "adam", "bias_correction": True}, "share": {
        "m": {"kind": "average", "every": 2, "between": "keep"},
        "v": {"kind": "average", "every": 3, "between": "keep", "codec": "log8"}}},
    {"name": "prefed", "tau_relative": 0.1},
    {"name": "fedadamw", "means": "row"},
]  # fmt: skip
WITH_STATISTICS = {"name": "resnet8", "width": 2, "norm": "batch"}


@pytest.mark.parametrize("algorithm", VARIANTS, ids=str)
def test_the_same_bits_as_simulation(algorithm: dict[str, Any], tmp_path: Path) -> None:
    weighting = {"fedadam": "samples", "prefed": "samples", "scaffold": [*range(1, 10)]}
    config = config_of(algorithm, weighting=weighting.get(algorithm["name"], "uniform"))
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for name, value in here.server.shared.items():
        assert torch.equal(value, there.server.shared[name])
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)


@pytest.mark.parametrize("options", [
    {"mean": "median", "attackers": {"share": 0.3, "attack": "sign_flip"}},
    {"mean": {"name": "trimmed", "share": 0.2, "bucket": 2}, "state_mean": "geometric",
     "weighting": "samples", "attackers": {"share": 0.3, "attack": "huge_state"}},
    {"mean": "plain", "state_mean": "clipped", "attackers": {"share": 0.3, "attack": "label_flip"}},
])  # fmt: skip
def test_means_and_liars_have_the_same_bits_as_in_simulation(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of({"name": "prefed", "client_lr": 0.01, "upload": "int8"}, **options)
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    assert torch.equal(here.server.shared["P"], there.server.shared["P"])
    assert [r["attackers"] for r in here.history] == [r["attackers"] for r in there.history]
    assert sum(r["attackers"] for r in here.history) > 0


def test_liars_that_must_know_what_others_send_are_refused(tmp_path: Path) -> None:
    config = config_of({"name": "fedavg"}, attackers={"share": 0.3, "attack": "alie"})
    with pytest.raises(PrefedError, match="attackers: these liars have to know"):
        Federation(config, tmp_path).deployment()


@pytest.mark.parametrize("algorithm", [
    {"name": "fednova", "client_momentum": 0.5}, {"name": "prefedopt"}, {"name": "scaffold"},
    {"name": "prefed", "momentum": "derived", "upload": "int8"}, {"name": "fedadam", "align": 0.3},
], ids=str)  # fmt: skip
def test_local_epochs_have_the_same_bits_as_in_simulation(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(algorithm, weighting="samples", local_steps=None, local_epochs=2)
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)
    assert len({record["local_steps"] for record in here.history}) > 1


@pytest.mark.parametrize("algorithm", [
    {"name": "fedbn"}, {"name": "fedrep", "personal": ["head.*"]},
    {"name": "prefed", "personal": ["@last"], "upload": "topk(0.1)"},
], ids=str)  # fmt: skip
def test_personal_parts_have_the_same_bits_as_in_simulation(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(algorithm, model=WITH_STATISTICS)
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)
    with pytest.raises(PrefedError, match="evaluate where they are"):
        there.result().client_model(0)


@pytest.mark.parametrize("statistics", ["average", "keep", "reset"])
def test_statistics_have_the_same_bits_as_in_simulation(statistics: str, tmp_path: Path) -> None:
    algorithm = {"name": "fedavg", "statistics": statistics}
    config = config_of(algorithm, model=WITH_STATISTICS, rounds=3)
    here, there = simulated(config), Federation(config, tmp_path).run()
    a, b = here.result().model.state_dict(), there.result().model.state_dict()
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    counts = {int(value) for name, value in a.items() if name.endswith("num_batches_tracked")}
    assert counts == {3 * 3 if statistics == "average" else 0}
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)


def test_order_and_number_of_nodes_do_not_matter(tmp_path: Path) -> None:
    config = config_of({"name": "prefed", "momentum": "keep"})
    results = []
    for nodes, backwards in ((1, False), (4, True), (9, False)):
        federation = Federation(config, tmp_path / str(nodes), nodes)
        federation.grid.backwards = backwards
        results.append(federation.run().server.weights)
        assert federation.grid.most_pulled == 1  # one reply at a time in memory
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("what", HOSTILE)
def test_a_refused_update_is_as_if_its_client_were_not_there(what: str, tmp_path: Path) -> None:
    config = config_of({"name": "prefed"}, clients_per_round=9, rounds=1)
    victim = 4
    there = Federation(config, tmp_path, tamper=poison(victim, what)).run()
    assert list(there.history[0]["refused"]) == [str(victim)]

    here = without(config, victim)
    assert torch.equal(here.weights, there.server.weights)
    assert torch.equal(here.shared["P"], there.server.shared["P"])


def test_a_retried_round_begins_from_the_state_before_it(tmp_path: Path) -> None:
    """A client trains, keeps its new state, and its reply is lost; asked again, it must not go on
    from what it kept in the attempt that nobody saw."""
    lost: list[int] = []

    def lose(node: int, message: Message, reply: Message) -> Message | None:
        training = p.ASK in message.content
        if training and message.content[p.ASK][p.ROUND] == 2 and len(lost) < 2:
            lost.append(node)
            return None
        return reply

    config = config_of({"name": "scaffold"}, clients_per_round=9)
    federation = Federation(config, tmp_path, tamper=lose, min_fraction=1.0, round_seconds=1.0)
    there, here = federation.run(), simulated(config)
    assert len(lost) == 2
    assert torch.equal(here.server.weights, there.server.weights)


def test_without_a_quorum_the_model_stays_and_the_run_ends(tmp_path: Path) -> None:
    def lose(node: int, message: Message, reply: Message) -> Message | None:
        return None if p.ASK in message.content else reply

    config = config_of({"name": "fedavg"})
    federation = Federation(config, tmp_path, tamper=lose, round_seconds=0.5, retries=1)
    deployment = federation.deployment()
    before = deployment.server.weights.clone()
    with pytest.raises(RunFailed, match=r"round 1: 0 of 4 clients .*\n.*no answer within"):
        deployment.run_round()
    assert torch.equal(before, deployment.server.weights)
    assert deployment.server.round == 0


def test_clients_of_a_missing_node_are_left_out(tmp_path: Path) -> None:
    config = config_of({"name": "fedavg"}, clients_per_round=9, rounds=1)
    federation = Federation(config, tmp_path)
    federation.grid.nodes.popitem()
    there = federation.run()
    assert sorted(there.history[0]["refused"]) == ["2", "5", "8"]
    assert there.history[0]["bytes_up"] * 9 == there.history[0]["bytes_down"] * 6


def test_nodes_with_another_config_or_a_taken_partition_are_turned_away(tmp_path: Path) -> None:
    config = config_of({"name": "fedavg"}, rounds=1)
    federation = Federation(config, tmp_path)
    other = tmp_path / "other.toml"
    other.write_text(tomli_w.dumps(config_of({"name": "fedavg"}, seed=1).to_dict()))
    place = {p.PARTITION: 0, p.PARTITIONS: 3, "state-dir": str(tmp_path)}
    federation.grid.nodes[5000] = (client_app(other), place)
    federation.grid.nodes[5001] = (client_app(federation.path), place)
    there = federation.run()
    assert isinstance(there.trainer, FlowerTrainer)
    assert not {5000, 5001} & set(there.trainer.nodes.nodes.values())
    assert torch.equal(there.server.weights, simulated(config).server.weights)


def test_divergence_is_told_as_such(tmp_path: Path) -> None:
    config = config_of({"name": "fedavg", "client_lr": 1e20}, clients_per_round=9)
    with pytest.raises(Diverged, match="Lower client_lr"):
        Federation(config, tmp_path).run()


def test_run_directory_resume_and_kept_state(tmp_path: Path) -> None:
    """The server stops after two rounds, having asked clients for a third that it never finished;
    a new server on new nodes with the old disks ends in the same bits."""
    config = config_of({"name": "prefed", "momentum": "keep"}, clients_per_round=9)

    class Gone(Exception):
        pass

    def die(node: int, message: Message, reply: Message) -> Message:
        if p.ASK in message.content and message.content[p.ASK][p.ROUND] == 2 and node != 1:
            raise Gone
        return reply

    folder = tmp_path / "run"
    first = Federation(config, tmp_path, tamper=die)
    options = first.options.to_run_config() | {"run-dir": str(folder)}
    from prefed.flower import replies

    with pytest.raises(Gone), pytest.MonkeyPatch.context() as patch:
        # What a tampering raises would be taken for an unreadable reply otherwise.
        patch.setattr(replies, "_fetch", lambda grid, n: next(iter(grid.pull_messages([n])), None))
        run(first.path.read_text(), first.grid, options)
    assert len(load_run(folder).history) == 2
    second = Federation(config, tmp_path)
    with pytest.raises(PrefedError, match="--resume"):
        run(second.path.read_text(), second.grid, options)
    check_folder(folder, config, resume=True)
    run(second.path.read_text(), second.grid, options | {"resume": True})
    stored = load_run(folder)
    assert stored.status == "finished"
    here = simulated(config)
    for ours, theirs in zip(here.history, stored.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)


def test_a_client_that_lost_its_state_begins_anew(tmp_path: Path) -> None:
    """As in a simulation whose client 3 has lost what it kept; what is damaged is not used."""
    config = config_of({"name": "scaffold"}, clients_per_round=9, rounds=2)
    federation = Federation(config, tmp_path, nodes=1)
    deployment = federation.run(1)
    state = next((tmp_path / "node-0").glob("*/client-3/*.state"))
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(bytes(content))
    deployment.run_round()
    assert deployment.history[1].get("refused") is None
    here = config.make_run()
    here.run_round()
    kept = local(here).kept
    assert isinstance(kept, InMemory)
    assert kept.pop(3)["c_i"].any()
    here.run_round()
    assert torch.equal(deployment.server.weights, here.server.weights)
    assert not torch.equal(here.server.weights, simulated(config).server.weights)


def test_lockstep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrefedError, match="simulation only"):
        Federation(config_of({"name": "prefedsync"}), tmp_path).deployment()
