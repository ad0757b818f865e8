"""Deployed configs with secure aggregation, in one process: the plain mean, from a sum alone."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from typer.testing import CliRunner

from prefed.cli import app
from prefed.core.errors import Diverged, PrefedError, RunFailed
from prefed.experiments.config import Config
from prefed.flower.deployment_options import Options
from prefed.flower.secure import stages as m
from prefed.flower.secure.vector import Form
from prefed.flower.server import FlowerTrainer, trainer_class
from prefed.flower.write import write_app
from prefed.training.run import Run
from tests.helpers.federation import Federation, config_of
from tests.helpers.loopback import Tamper
from tests.helpers.secure_mean import plain, plain_mean

EVERYONE = {"clients_per_round": 9, "rounds": 1}
STATISTICS = {"name": "resnet8", "width": 2, "norm": "batch"}


def secure(config: Config, folder: Path, nodes: int = 9, tamper: Tamper | None = None,
           **options: Any) -> Federation:  # fmt: skip
    return Federation(config, folder, nodes, tamper, secure_aggregation=True, **options)


def assert_is_plain_mean(
    there: Run, config: Config, without: Collection[int] = (), total: int | None = None
) -> None:
    arrived = there.trainer.train(there.server, there.draw_cohort())
    wanted = plain_mean(config, without, total)
    assert arrived.clients == len(there.draw_cohort()) - len(without)
    assert arrived.mean.keys() == wanted.keys() - {"loss"}
    found = arrived.mean | {"loss": torch.tensor([arrived.loss], dtype=torch.float64)}
    for name, (exact, bound) in wanted.items():
        assert (np.abs(found[name].double().numpy().reshape(-1) - exact) <= bound).all(), name


MORE: list[dict[str, Any]] = [
    {"name": "prefedopt"}, {"name": "scaffold"}, {"name": "adaalter"},
    {"name": "prefed", "shape": "kronecker"}, {"name": "fedavg", "upload": "topk(0.1)"},
    {"name": "prefed", "P_every": 3, "aggregate": "sqrtP"},
]  # fmt: skip


@pytest.mark.parametrize("algorithm", [
    {"name": "prefed"}, {"name": "fednova"}, {"name": "prefedlite"},
    {"name": "prefed", "momentum": "keep", "personal": ["@last"]},
    *(pytest.param(more, marks=pytest.mark.slow) for more in MORE),
], ids=str)  # fmt: skip
def test_the_plain_mean(algorithm: dict[str, Any], tmp_path: Path) -> None:
    samples = algorithm["name"] in ("prefed", "fednova")
    config = config_of(algorithm, **EVERYONE, weighting="samples" if samples else "uniform")
    assert_is_plain_mean(secure(config, tmp_path, 3).deployment(), config)


def test_statistics_and_weights_of_one_s_own(tmp_path: Path) -> None:
    config = config_of({"name": "prefed"}, **EVERYONE, model=STATISTICS, weighting=[*range(1, 10)])
    assert_is_plain_mean(secure(config, tmp_path, 4).deployment(), config)


def test_the_bits_do_not_depend_on_nodes_order_or_keys(tmp_path: Path) -> None:
    """Sums of integers are exact, so here they do not even depend on who is drawn together."""
    config = config_of({"name": "prefed", "momentum": "keep"}, clients_per_round=6, rounds=2)
    runs = []
    for nodes, backwards in ((3, False), (5, True), (9, False)):
        federation = secure(config, tmp_path / str(nodes), nodes)
        federation.grid.backwards = backwards
        runs.append(federation.run())
    for other in runs[1:]:
        assert torch.equal(runs[0].server.weights, other.server.weights)
        assert torch.equal(runs[0].server.shared["P"], other.server.shared["P"])
    halfway = secure(config, tmp_path / "again", 4).run(1)
    resumed = secure(config, tmp_path / "again", 4).deployment()
    resumed.restore({n: v.clone() for n, v in halfway.snapshot().items()}, halfway.history)
    for _ in resumed.rounds():
        pass
    assert torch.equal(runs[0].server.weights, resumed.server.weights)


def failing(who: dict[int, str]) -> Tamper:
    """Partitions that fail from a stage on. Node ids are those of the helper."""
    ids = {(7919 * n) % 1009 + 1: stage for n, stage in who.items()}
    stages = (m.KEYS, m.SHARES, m.MASKED, m.UNMASK)

    def tamper(node: int, message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type.partition(".")[2]
        if node in ids and kind in stages[stages.index(ids[node]) :]:
            return Message(Error(code=8, reason="killed"), reply_to=message)
        return reply

    return tamper


@pytest.mark.parametrize("who", [
    {2: m.KEYS, 5: m.SHARES, 7: m.MASKED}, {1: m.UNMASK, 2: m.MASKED, 8: m.UNMASK},
], ids=str)  # fmt: skip
def test_a_third_drops_out(who: dict[int, str], tmp_path: Path) -> None:
    config = config_of({"name": "prefed"}, **EVERYONE)
    without = {n for n, stage in who.items() if stage != m.UNMASK}
    there = secure(config, tmp_path, tamper=failing(who)).deployment()
    assert_is_plain_mean(there, config, without)
    record = there.run_round()
    assert set(record["refused"]) == {str(n) for n in without}
    assert all("killed" in reason for reason in record["refused"].values())
    length = 610 * 3 + 2 + 2
    assert record["bytes_up"] == (9 - len(without)) * 8 * length
    assert record["clipped"] == 0


def test_a_round_below_the_threshold_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of({"name": "prefed"}, clients_per_round=9, rounds=9)
    for who, line in {
        m.MASKED: "5 of 9 nodes have sent a masked vector; of the 9 around node 0 it takes 6, not",
        m.UNMASK: "fewer than 6 shares of a secret came back",
    }.items():
        federation = secure(config, tmp_path / who, retries=1)
        there = federation.deployment()
        there.run_round()
        before = there.server.weights.clone()
        caplog.clear()
        federation.grid.tamper = failing(dict.fromkeys(range(4), who))
        with caplog.at_level(logging.WARNING):
            record = there.run_round()
        assert record["skipped"]
        assert f"round 2 is skipped: {line}" in caplog.text
        assert torch.equal(there.server.weights, before)
        with pytest.raises(RunFailed, match="Rounds without a sum: 2 in a row"):
            there.run_round()
    federation.grid.tamper = lambda node, message, reply: reply
    there.server.round = 2
    assert "skipped" not in there.run_round()
    assert not torch.equal(there.server.weights, before)


def test_the_fraction_that_must_answer_is_asked_for_before_anything_is_unmasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of({"name": "fedavg"}, **EVERYONE)
    federation = secure(config, tmp_path, tamper=failing({1: m.MASKED}), min_fraction=1.0)
    with caplog.at_level(logging.WARNING):
        assert federation.deployment().run_round()["skipped"]
    assert "8 of 9 clients are there, 9 are needed" in caplog.text


def test_divergence(tmp_path: Path) -> None:
    config = config_of({"name": "fedavg", "client_lr": 1e38}, **EVERYONE)
    with pytest.raises(Diverged, match="the training loss is not finite"):
        secure(config, tmp_path).run(1)


def vectors(change: Any, node: int = 4) -> Tamper:
    ids = (7919 * node) % 1009 + 1

    def tamper(at: int, message: Message, reply: Message) -> Message:
        if at == ids and not reply.has_error() and m.VECTOR in reply.content:
            record: Any = reply.content[m.VECTOR]
            changed = change(record[m.VECTOR].numpy())
            record[m.VECTOR] = changed if isinstance(changed, Array) else Array(changed)
        return reply

    return tamper


@pytest.mark.parametrize("change", [
    lambda v: v[:-1],
    pytest.param(lambda v: v.astype(np.float64), marks=pytest.mark.slow),
    pytest.param(lambda v: v[None], marks=pytest.mark.slow),
    lambda v: Array("int64", v.shape, "numpy.ndarray", Array(v).data[:-8]),
], ids=["short", "floats", "shape", "lying header"])  # fmt: skip
def test_a_vector_of_another_form_is_refused_and_its_node_left_out(
    change: Any, tmp_path: Path
) -> None:
    config = config_of({"name": "prefed"}, **EVERYONE)
    there = secure(config, tmp_path, tamper=vectors(change)).deployment()
    assert_is_plain_mean(there, config, {4})


@pytest.mark.parametrize("change", [
    lambda v: v + 1, lambda v: np.random.default_rng(0).integers(-(2**62), 2**62, len(v)),
], ids=["weight", "noise"])  # fmt: skip
def test_a_sum_that_honest_nodes_do_not_have_is_refused(
    change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of({"name": "fedavg"}, **EVERYONE)
    with caplog.at_level(logging.WARNING):
        assert secure(config, tmp_path, tamper=vectors(change)).run().history[0]["skipped"]
    assert "the sum is refused" in caplog.text


def test_a_negative_second_moment_in_the_sum_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lower(vector: np.ndarray) -> np.ndarray:
        vector = vector.copy()
        vector[3 : 3 + 610] -= 2**50  # after weight, clipped and loss: P, by the alphabet
        return vector

    config = config_of({"name": "prefed"}, **EVERYONE)
    order = list(Form(config.make_run().algorithm, config.make_run().server).values)
    assert order[:2] == ["loss", "P"]
    with caplog.at_level(logging.WARNING):
        assert secure(config, tmp_path, tamper=vectors(lower)).run().history[0]["skipped"]
    assert "the sum is refused: P: values below 0" in caplog.text


def seen(into: list[bytes]) -> Tamper:
    def tamper(node: int, message: Message, reply: Message) -> Message:
        for record in reply.content.values():
            if isinstance(record, ArrayRecord):
                into.extend(array.data for array in record.values())
            elif isinstance(record, ConfigRecord):
                for value in record.values():
                    values = value if isinstance(value, list) else [value]
                    into.extend(v if isinstance(v, bytes) else str(v).encode() for v in values)
            else:
                into.append(str(dict(record)).encode())
        return reply

    return tamper


@pytest.mark.parametrize("is_secure", [True, False])
def test_what_the_server_gets_to_see(is_secure: bool, tmp_path: Path) -> None:
    """Of no client the update, its loss or its number of samples; in the clear, all of them."""
    config = config_of({"name": "prefed"}, **EVERYONE, weighting="samples")
    here, updates = plain(config)
    all_seen: list[bytes] = []
    make = secure if is_secure else Federation
    there = make(config, tmp_path, 9, seen(all_seen)).run()
    assert "skipped" not in there.history[0]
    everything = b"\n".join(all_seen)
    form = Form(here.algorithm, here.server)
    fixed = form.fixed_point(form.exponents(), sum(weight for _, _, weight in updates.values()))
    found = 0
    for values, loss, weight in updates.values():
        tensors = {n: torch.from_numpy(v) for n, v in values.items()}
        vector = form.encode(fixed, tensors, loss, weight)
        assert vector is not None
        nonzero = vector[np.flatnonzero(np.abs(vector) > 2**20)]
        found += sum(number.tobytes() in everything for number in nonzero)
        for value in (values["weights"], values["P"], values["m"]):
            floats = value.astype(np.float32)
            where = np.flatnonzero(floats)[:40]
            found += sum(floats[i : i + 2].tobytes() in everything for i in where)
        found += str(loss).encode() in everything
        found += f"'num-examples': {weight}".encode() in everything
    assert (found == 0) == is_secure
    assert (found > 9 * 100) != is_secure


def test_a_node_sends_nothing_in_the_clear_if_its_owner_says_so(tmp_path: Path) -> None:
    config = config_of({"name": "fedavg"}, **EVERYONE)
    federation = Federation(config, tmp_path, 3, retries=0)
    for _, place in federation.grid.nodes.values():
        place["secure-aggregation"] = True
    with pytest.raises(RunFailed, match="asks for an update in the clear"):
        federation.run()
    federation = Federation(config, tmp_path, 3, retries=0)
    federation.grid.run_config = {"secure-aggregation": True}
    assert trainer_class(federation.options) is FlowerTrainer
    with pytest.raises(RunFailed, match="asks for an update in the clear"):
        federation.run()


def test_counts_of_samples_that_only_nodes_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of({"name": "prefed"}, **EVERYONE, weighting="samples")

    def deployment(largest: int) -> Run:
        federation = secure(config, tmp_path / str(largest), largest_count=largest)
        make = partial(
            trainer_class(federation.options), grid=federation.grid, own_data=True,
            config=federation.path.read_text(), options=federation.options,
        )  # fmt: skip
        made = config.make_run(make)
        made.prepare()
        return made

    assert_is_plain_mean(deployment(5000), config, total=9 * 5000)
    counts = [weight for _, _, weight in plain(config)[1].values()]
    too_low = sorted(counts)[-1] - 1
    there = deployment(too_low)
    with caplog.at_level(logging.WARNING):
        record = there.run_round()
    (reason,) = record["refused"].values()
    assert f"more samples than largest-count = {too_low}" in reason
    assert str(max(counts)) not in reason


@pytest.mark.parametrize(("algorithm", "changes", "message"), [
    ({"name": "prefedsync"}, {}, "meet in every local step"),
    ({"name": "fedavg"}, {"weighting": [1.5] * 9}, "1.5 is not a whole number"),
    ({"name": "fedavg"}, {"data": {"name": "digits", "client_test": 0.2, "split": {
        "name": "dirichlet", "clients": 9, "alpha": 0.3}}}, "set data.client_test to 0"),
], ids=str)  # fmt: skip
def test_what_cannot_be_had_from_sums_is_refused(
    algorithm: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = config_of(algorithm, **changes)
    with pytest.raises(PrefedError, match=message):
        write_app(tmp_path / "app", config, Options(secure_aggregation=True))
    with pytest.raises(PrefedError, match=message):
        secure(config, tmp_path / "run").deployment()


@pytest.mark.parametrize(("words", "message"), [
    (["--local", "2", "--secure-aggregation"], "three nodes or more"),
    (["--local", "4", "--secure-aggregation", "--norm-cap", "1"], "sees no single update"),
    (["--local", "4", "--secure-aggregation", "--secure-neighbours", "2"], "secure_neighbours"),
    (["--local", "4", "--secure-aggregation", "--largest-count", "0"], "largest_count"),
])  # fmt: skip
def test_usage(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["deploy", "digits-noniid", *words], env={"COLUMNS": "200"})
    assert message in f"{done.output} {done.exception}"
    assert done.exit_code == 2 or isinstance(done.exception, PrefedError)


def test_options_go_through_a_run_config() -> None:
    for options in (
        Options(), Options(secure_aggregation=True, secure_neighbours=6, largest_count=7),
    ):  # fmt: skip
        table = options.to_run_config()
        assert Options.from_run_config({**table, "run-dir": "x"}) == options
        assert None not in table.values()


def test_numbers_beyond_their_bounds_are_cut_off_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps so long that changes leave +-1024: the sum does not wrap around."""
    config = config_of({"name": "fedavg", "client_lr": 3e4}, **EVERYONE, local_steps=1)
    with caplog.at_level(logging.WARNING):
        there = secure(config, tmp_path).run()
    assert there.history[0]["clipped"] > 0
    assert "beyond their bounds and cut off" in caplog.text
    change = there.server.weights - plain(config)[0].server.weights
    assert float(change.abs().max()) <= 1024.001


def test_rounds_of_clients_on_fewer_than_three_nodes_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of({"name": "fedavg"}, **EVERYONE)
    with caplog.at_level(logging.WARNING):
        assert secure(config, tmp_path, 2).run().history[0]["skipped"]
    assert "of this round are on 2 nodes; 3 are the fewest in a sum" in caplog.text
