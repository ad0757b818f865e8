"""The drop-in strategies, in one process with real ClientApps."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as fs
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import nn

import prefed
import prefed.flower
from prefed.core.errors import PrefedError, RunFailed
from prefed.flower.client_metrics import mean_metrics
from prefed.rules import SGD, Adam
from prefed.training.batches import Batches
from tests.helpers import ROOT
from tests.helpers.flower_apps import LR, OPTIONS, STEPS, flat, run, tiny_app, tiny_grid
from tests.helpers.loopback import LoopbackGrid, Tamper
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

STOCK = ROOT / "examples" / "flower_stock"


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(STOCK))
    return importlib.import_module("stock.client_app")


def stock_nodes(stock: ModuleType, count: int = 4) -> dict[int, tuple[ClientApp, dict[str, Any]]]:
    config = {"partition-id": 0, "num-partitions": count}
    return {901 - 100 * n: (stock.app, config | {"partition-id": n}) for n in range(count)}


@pytest.mark.long
@pytest.mark.parametrize("make", [
    lambda: prefed.flower.FedAdam(server_lr=0.003, beta1=0.0),
    lambda: prefed.flower.PreFedOpt(server_lr=0.003, per_step=False),
    lambda: prefed.flower.FedAvg(fraction_train=0.75),
])  # fmt: skip
def test_a_stock_app_trains(make: Any, stock: ModuleType) -> None:
    net = sys.modules["stock.task"].Net
    torch.manual_seed(0)
    first = ArrayRecord(net().state_dict())
    grid = LoopbackGrid(stock_nodes(stock), run_config={"local-epochs": 1})
    result = make().start(grid, first, 8, train_config=ConfigRecord({"lr": 0.1}))
    accuracy = [m["eval_acc"] for m in result.evaluate_metrics_clientapp.values()]
    assert accuracy[-1] > 0.85
    assert accuracy[0] < 0.6
    final = result.arrays.to_torch_state_dict()
    assert final["norm.num_batches_tracked"].dtype == torch.int64
    assert int(final["norm.num_batches_tracked"]) == 8 * 6
    assert {n: (v.shape, v.dtype) for n, v in final.items()} == {
        n: (v.shape, v.dtype) for n, v in net().state_dict().items()
    }


def simulated(algorithm: prefed.Algorithm, rounds: int = 4, **options: Any) -> torch.Tensor:
    options = {"weighting": "samples", **options}
    return prefed.simulate(
        algorithm, tiny_model(), tiny_data(), rounds=rounds, local_steps=STEPS, batch_size=None,
        engine="sequential", **options,
    ).weights  # fmt: skip


@pytest.mark.parametrize(
    "name", ["FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "PreFedOpt"]
)
def test_server_side_algorithms_with_a_plain_client(name: str, tmp_path: Path) -> None:
    strategy = getattr(prefed.flower, name)(client_lr=LR, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays()), tmp_path))
    wanted = simulated(getattr(prefed, name)(client_lr=LR))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [
    {"name": "PreFed"}, {"name": "PreFed", "momentum": "keep"},
    {"name": "PreFed", "momentum": "reset"}, {"name": "PreFed", "bias_correction": True},
    {"name": "AdaAlter"}, {"name": "SCAFFOLD"}, {"name": "FedProx"},
    {"name": "FedCM"}, {"name": "FedLADA"}, {"name": "FedAdamW"}, {"name": "FedLion"},
    {"name": "FedPM", "tau_relative": 0.1}, {"name": "PreFedM"},
    {"name": "FedAvg", "mean_of_rounds": 1.0},
    {"name": "Pair", "client": Adam(), "share": {"m": prefed.average(every=2, between="keep")}},
    {"name": "FedAvg", "align": 0.3}, {"name": "PreFed", "align": 0.3, "align_form": "mixed"},
    {"name": "FedAdam", "align": 0.3, "decoupled_weight_decay": 0.1},
    {"name": "Pair", "client": Adam(bias_correction=True), "server": SGD(0.5, nesterov=True),
     "share": {"m": prefed.keep(), "v": prefed.average()}},
], ids=str)  # fmt: skip
def test_client_side_algorithms_with_local_train(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    name = options.pop("name")
    strategy = getattr(prefed.flower, name)(client_lr=0.01, **options, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "local_train"), tmp_path))
    wanted = simulated(getattr(prefed, name)(client_lr=0.01, **options))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("means", [
    {"mean": "median"}, {"mean": "plain", "state_mean": "geometric"},
    {"mean": {"name": "trimmed", "share": 0.2, "bucket": 2}},
], ids=str)  # fmt: skip
def test_means_that_bear_liars(means: dict[str, Any], tmp_path: Path) -> None:
    strategy = prefed.flower.PreFed(client_lr=0.01, **means, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "local_train"), tmp_path))
    wanted = simulated(prefed.PreFed(client_lr=0.01), **means)
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "words"), [
    ({"mean": "medain"}, 'did you mean "median"'),
    ({"mean": "median", "weighting": "uniform", "privacy": prefed.flower.CentralDP(1.0, 1.0)},
     "privacy: the noise is made for the plain mean"),
])  # fmt: skip
def test_means_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PrefedError, match=words):
        prefed.flower.FedAvg(client_lr=LR, **options)


def test_krum_is_refused_for_clients_with_weights(tmp_path: Path) -> None:
    strategy = prefed.flower.FedAvg(client_lr=LR, mean="krum", **OPTIONS)
    with pytest.raises(PrefedError, match='weighting="uniform"'):
        run(strategy, tiny_grid(tiny_app(arrays()), tmp_path))


class WithBuffers(nn.Module):
    """BatchNorm, and constants that have no mean."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = tiny_model(), nn.BatchNorm1d(SIZES[0]).double()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]).double())
        self.register_buffer("turn", torch.tensor([0.54 + 0.84j]))
        self.register_buffer("large", torch.tensor([2**62 + 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.norm(x)) + 0 * self.mask.exp()
        return out


@pytest.mark.parametrize("helper", ["plain", "local_train"])
@pytest.mark.parametrize("statistics", ["average", "keep", "reset"])
def test_statistics_and_constants(statistics: Any, helper: str, tmp_path: Path) -> None:
    """As in simulation. A client without our helper knows no policy: it sends its statistics, and
    gets those that the server has."""
    options: dict[str, Any] = {"client_lr": LR, "statistics": statistics}
    app = tiny_app(arrays(), helper, make=WithBuffers)
    strategy = prefed.flower.FedAvg(**options, **OPTIONS)
    found = run(strategy, tiny_grid(app, tmp_path), make=WithBuffers).arrays.to_torch_state_dict()
    if helper == "plain" and statistics == "keep":
        options["statistics"] = "reset"
    wanted = prefed.simulate(
        prefed.FedAvg(**options), WithBuffers(), tiny_data(), rounds=4, local_steps=STEPS,
        batch_size=None, engine="sequential", weighting="samples",
    ).model.state_dict()  # fmt: skip
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert torch.equal(found["large"], torch.tensor([2**62 + 1]))


def test_the_mean_of_rounds_counts_steps_and_begins_anew(tmp_path: Path) -> None:
    """Statistics have a mean over rounds, counters have none; a second start is another run."""
    options: dict[str, Any] = {"client_lr": LR, "mean_of_rounds": 1.0}
    app = tiny_app(arrays(), "local_train", make=WithBuffers)
    strategy, grid = prefed.flower.FedAvg(**options, **OPTIONS), tiny_grid(app, tmp_path)
    first, second = (run(strategy, grid, make=WithBuffers).arrays for _ in range(2))
    wanted = prefed.simulate(
        prefed.FedAvg(**options), WithBuffers(), tiny_data(), rounds=4, local_steps=STEPS,
        batch_size=None, engine="sequential", weighting="samples",
    ).model.state_dict()  # fmt: skip
    for found in (first, second):
        for name, value in found.to_torch_state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12)


def test_prefed_with_the_optimiser_and_two_lines(tmp_path: Path) -> None:
    strategy = prefed.flower.PreFed(client_lr=LR, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "covariance"), tmp_path))
    wanted = simulated(prefed.PreFed(client_lr=LR))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-10)


WITHOUT_STEPS = {"fraction_evaluate": 0.0, "ask_partitions": True}


def counted(seen: list[str], change: Any = lambda reply, count: reply) -> Tamper:
    """Counts what nodes are asked to train, and hands each reply to `change`."""

    def tamper(node: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return reply
        asked = any("prefed-question" in r for r in message.content.config_records.values())
        seen.append("question" if asked else "train")
        return change(reply, len(seen))  # type: ignore[no-any-return]

    return tamper


def failed(reply: Message, count: int) -> Message:
    if count > 1:
        return reply
    broken = Message(Error(code=2, reason="no space left"), reply_to=reply)
    broken.metadata.__dict__ |= reply.metadata.__dict__
    return broken


@pytest.mark.parametrize("name", ["PreFed", "AdaAlter", "SCAFFOLD", "FedCM"])
def test_a_client_without_the_rule_is_noticed_before_others_train(
    name: str, tmp_path: Path
) -> None:
    seen: list[str] = []
    grid = tiny_grid(tiny_app(arrays()), tmp_path, counted(seen))
    with pytest.raises(PrefedError, match=r"(?s)no record 'prefed-state' .*\.local_train\(message"):
        run(getattr(prefed.flower, name)(**WITHOUT_STEPS), grid)
    assert seen == ["question"]


def test_clients_that_do_not_move_along_the_mean_change_are_noticed(tmp_path: Path) -> None:
    strategy = prefed.flower.FedAvg(align=0.3, **OPTIONS)
    with pytest.raises(PrefedError, match=r"no record 'prefed-state' \(mean_change"):
        run(strategy, tiny_grid(tiny_app(arrays()), tmp_path))
    strategy = prefed.flower.PreFed(align=0.3, **OPTIONS)
    with pytest.raises(RunFailed, match=r"align: .* needs local_train"):
        run(strategy, tiny_grid(tiny_app(arrays(), "covariance"), tmp_path))


@pytest.mark.parametrize("options", [
    {"client_lr": "os:cpu_count"}, {"name": "pair", "client": {"name": "os:abort"}},
    {"name": "os:abort"}, {"upload": "os:abort"},
], ids=str)  # fmt: skip
def test_a_message_does_not_choose_what_is_imported(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.dumps({"name": "fedavg", **options})
    monkeypatch.setattr("prefed.flower.strategy.tell", lambda algorithm: told)
    grid = tiny_grid(tiny_app(arrays(), "local_train"), tmp_path)
    with pytest.raises(RunFailed, match=r"the server runs os:.* hand the algorithm"):
        run(prefed.flower.FedAvg(**OPTIONS), grid)


def test_without_an_answer_the_first_round_tells_and_is_not_repeated(tmp_path: Path) -> None:
    seen: list[str] = []
    grid = tiny_grid(tiny_app(arrays()), tmp_path, counted(seen, failed))
    with pytest.raises(PrefedError, match="local_train"):
        run(prefed.flower.PreFed(**WITHOUT_STEPS), grid)
    assert seen == ["question"] + ["train"] * 6


def test_local_train_answers_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    update = prefed.flower.stock_client.local_update

    def local_update(*parts: Any) -> Any:
        trained.append(1)
        return update(*parts)

    monkeypatch.setattr("prefed.flower.stock_client.local_update", local_update)
    seen: list[str] = []
    grid = tiny_grid(tiny_app(arrays(), "local_train"), tmp_path, counted(seen))
    run(prefed.flower.PreFed(client_lr=LR, **WITHOUT_STEPS), grid, 2)
    assert seen == ["question"] + ["train"] * 12
    assert len(trained) == 12


def test_a_question_that_fails_holds_nobody_up(tmp_path: Path) -> None:
    grid = tiny_grid(tiny_app(arrays(), "local_train"), tmp_path, counted([], failed))
    result = run(prefed.flower.PreFed(client_lr=LR, **WITHOUT_STEPS), grid)
    wanted = simulated(prefed.PreFed(client_lr=LR))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("helper", "metrics"), [
    ("local_train", {}), ("plain", {"local-steps": STEPS}), ("plain", {"local-steps": 1.0 * STEPS}),
])  # fmt: skip
def test_prefedopt_learns_the_number_of_local_steps(
    helper: str, metrics: dict[str, Any], tmp_path: Path
) -> None:
    strategy = prefed.flower.PreFedOpt(client_lr=LR, **WITHOUT_STEPS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), helper, metrics), tmp_path))
    wanted = simulated(prefed.PreFedOpt(client_lr=LR))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [None, 0, -3, 2.5, float("nan"), 10**8, [3]])
def test_prefedopt_never_guesses_the_number_of_local_steps(steps: Any, tmp_path: Path) -> None:
    metrics = {} if steps is None else {"local-steps": steps}
    seen: list[str] = []
    grid = tiny_grid(tiny_app(arrays(), "plain", metrics), tmp_path, counted(seen))
    with pytest.raises(PrefedError, match=r"'local-steps'.*local_steps=.*per_step=False"):
        run(prefed.flower.PreFedOpt(**WITHOUT_STEPS), grid)
    assert seen == ["question"]
    private = prefed.flower.PreFedOpt(
        weighting="uniform", privacy=prefed.flower.CentralDP(1.0, 1.0), **WITHOUT_STEPS
    )
    with pytest.raises(PrefedError, match="no privacy; give local_steps="):
        run(private, grid)
    assert seen == ["question"]


@pytest.mark.parametrize("name", ["FedNova", "PreFedOpt", "PreFed"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_clients_that_take_unequally_many_steps(name: str, weighting: Any, tmp_path: Path) -> None:
    """Each makes two passes in batches of four, in the order that simulation draws."""
    options: dict[str, Any] = {"momentum": "derived"} if name == "PreFed" else {}
    asked = {"rounds": 3, "local_epochs": 2, "batch_size": 4, "weighting": weighting}
    settings = prefed.Settings(**asked)
    app = ClientApp()
    prefed.flower.tell_partition(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        round = int(message.content.config_records["config"]["server-round"]) - 1  # type: ignore[arg-type]
        made = Batches(tiny_data().client(number), number, round, settings)
        mine = [made[k] for k in range(len(made))]
        samples = len(tiny_data().client(number))
        answer: Message = prefed.flower.local_train(
            message, context, tiny_model(), mine, samples=samples
        )
        return answer

    strategy = getattr(prefed.flower, name)(
        client_lr=0.01, weighting=weighting, **options, **WITHOUT_STEPS
    )
    found = flat(run(strategy, tiny_grid(app, tmp_path), 3).arrays)
    algorithm = getattr(prefed, name)(client_lr=0.01, **options)
    wanted = prefed.simulate(algorithm, tiny_model(), tiny_data(), engine="sequential", **asked)
    torch.testing.assert_close(found, wanted.weights, rtol=0, atol=1e-12)


def test_one_client_cannot_move_the_number_of_local_steps(tmp_path: Path) -> None:
    lie = tampered("metrics", lambda r: r.update({"local-steps": 10**6}))
    metrics = {"local-steps": STEPS}
    results = []
    for tamper in (None, lie):
        grid = tiny_grid(tiny_app(arrays(), "plain", metrics), tmp_path, tamper)
        strategy = prefed.flower.PreFedOpt(client_lr=LR, **WITHOUT_STEPS)
        results.append(flat(run(strategy, grid).arrays))
    assert torch.equal(*results)


class Lines(logging.Handler):
    """What Flower's logger shows while a `with` lasts."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("flwr").addHandler(self)
        return self.lines

    def __exit__(self, *error: object) -> None:
        logging.getLogger("flwr").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_number_of_local_steps_that_clients_contradict_is_told(tmp_path: Path) -> None:
    app = tiny_app(arrays(), "plain", {"local-steps": STEPS})
    with Lines() as lines:
        run(prefed.flower.PreFedOpt(**OPTIONS | {"local_steps": 7}), tiny_grid(app, tmp_path), 1)
    assert f"local_steps is 7, and clients say that they took {STEPS} to {STEPS}" in lines


@pytest.mark.parametrize(("helper", "warned"), [("plain", True), ("local_train", False)])
def test_a_rule_for_clients_that_nobody_follows_is_told(
    helper: str, warned: bool, tmp_path: Path
) -> None:
    with Lines() as lines:
        run(prefed.flower.FedProx(**OPTIONS), tiny_grid(tiny_app(arrays(), helper), tmp_path), 2)
    told = [line for line in lines if "6 of 6 clients train in their own way: FedProx" in line]
    assert len(told) == int(warned)


def test_the_log_is_that_of_flower_s_own_strategy(stock: ModuleType) -> None:
    """Line for line, numbers of one run apart, in one and the same app."""
    shown, results = [], []
    for make in (fs.FedAvg, prefed.flower.FedAvg):
        torch.manual_seed(0)
        first = ArrayRecord(sys.modules["stock.task"].Net().state_dict())
        grid = LoopbackGrid(stock_nodes(stock), run_config={"local-epochs": 1})
        with Lines() as lines:
            results.append(
                make(fraction_train=0.5).start(
                    grid, first, 2, train_config=ConfigRecord({"lr": 0.1}),
                    evaluate_fn=lambda round, arrays: MetricRecord({"acc": round / 4}),
                )
            )  # fmt: skip
        shown.append([re.sub(r"\d+\.\d+(e[+-]\d+)?", "#", line) for line in lines])
    theirs, ours = shown
    assert "Starting FedAvg strategy:" in ours
    assert [line for line in theirs if line not in ours and "└──Minimum avail" not in line] == []
    begin = theirs.index("[ROUND 1/2]")
    assert theirs[begin:] == ours[ours.index("[ROUND 1/2]") :]
    assert "aggregate_evaluate: Received 4 results and 0 failures" in ours


def test_metrics_are_reduced_as_flower_does_it() -> None:
    draw = np.random.default_rng(0)
    contents = [
        RecordDict({"m": MetricRecord({
            "num-examples": int(draw.integers(1, 50)), "z": float(draw.normal()),
            "per-class": [float(v) for v in draw.normal(size=3)], "count": int(draw.integers(9)),
        })})
        for _ in range(5)
    ]  # fmt: skip
    theirs = aggregate_metricrecords(contents, "num-examples")
    ours = mean_metrics(contents, "num-examples")
    assert list(ours) == list(theirs) == ["z", "per-class", "count"]
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-12)
    for bad in ([1.0, 2.0], 1.0, [1.0, float("nan"), 0.0]):
        contents[3].metric_records["m"]["per-class"] = cast(Any, bad)
        assert list(mean_metrics(contents, "num-examples")) == ["z", "count"]


@pytest.mark.long
def test_the_readme_of_the_stock_example(stock: ModuleType, tmp_path: Path) -> None:
    """Its lines for PreFed, in place of the train function."""
    readme = (STOCK / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    task = sys.modules["stock.task"]
    names = {**vars(stock), "app": (app := ClientApp())}
    exec(compile(block, "README.md", "exec"), names)
    app.evaluate()(stock.evaluate)
    nodes = {n: (app, config) for n, (_, config) in stock_nodes(stock).items()}
    torch.manual_seed(0)
    grid = LoopbackGrid(nodes, run_config={"local-epochs": 1})
    assert "prefed.flower.PreFed(client_lr=0.003)" in readme
    strategy = prefed.flower.PreFed(client_lr=0.003)
    result = strategy.start(grid, ArrayRecord(task.Net().state_dict()), 5)
    assert result.evaluate_metrics_clientapp[5]["eval_acc"] > 0.7
    assert list(result.train_metrics_clientapp[1]) == ["local-steps", "train_loss"]
    assert result.train_metrics_clientapp[1]["local-steps"] == 6


def test_cohorts_are_those_of_simulation(tmp_path: Path) -> None:
    strategy = prefed.flower.FedAvg(client_lr=LR, fraction_train=0.5, min_train_nodes=1, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays()), tmp_path))
    wanted = simulated(prefed.FedAvg(client_lr=LR), clients_per_round=3)
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


def test_arrival_order_does_not_matter(tmp_path: Path) -> None:
    results = []
    for backwards in (False, True):
        grid = tiny_grid(tiny_app(arrays()), tmp_path)
        grid.backwards = backwards
        results.append(flat(run(prefed.flower.FedAdam(**OPTIONS), grid).arrays))
    assert torch.equal(*results)


def tampered(key: str, change: Any) -> Tamper:
    def tamper(node: int, message: Message, reply: Message) -> Message:
        if node == 5 and message.metadata.message_type == "train":
            change(reply.content[key])
        return reply

    return tamper


def set_nan(record: ArrayRecord) -> None:
    value = record["0.weight"].numpy().copy()
    value[0, 0] = np.nan
    record["0.weight"] = Array(value)


@pytest.mark.parametrize("tamper", [
    tampered("arrays", set_nan),
    tampered("arrays", lambda r: r.update({"0.bias": Array(np.zeros(1))})),
    tampered("arrays", lambda r: r.update({"0.bias": Array(np.zeros(4, np.float32))})),
    tampered("arrays", lambda r: r.pop("0.bias")),
    tampered("metrics", lambda r: r.update({"num-examples": 10**12})),
    tampered("metrics", lambda r: r.update({"num-examples": -0.5})),
    tampered("metrics", lambda r: r.update({"num-examples": float("nan")})),
])  # fmt: skip
def test_a_refused_update_leaves_the_round_of_the_others(tamper: Tamper, tmp_path: Path) -> None:
    def lose(node: int, message: Message, reply: Message) -> Message | None:
        return None if node == 5 and message.metadata.message_type == "train" else reply

    make = prefed.flower.FedAdam
    grids = [tiny_grid(tiny_app(arrays()), tmp_path, how) for how in (tamper, lose)]
    honest = tiny_grid(tiny_app(arrays()), tmp_path)
    first = ArrayRecord(tiny_model().state_dict())
    got = [flat(make(**OPTIONS).start(g, first, 2, timeout=0.5).arrays) for g in [*grids, honest]]
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[0], got[2])


def test_quorum_and_deadline(tmp_path: Path) -> None:
    grid = tiny_grid(tiny_app(arrays()), tmp_path, lambda node, message, reply: None)
    grid.nodes.pop(5)
    strategy = prefed.flower.FedAvg(fraction_evaluate=0.0, retries=1)
    with pytest.raises(RunFailed, match="0 of 5 clients"):
        strategy.start(grid, ArrayRecord(tiny_model().state_dict()), 1, timeout=0.3)
    late = prefed.flower.FedAvg(min_available_nodes=7, join_seconds=0.2)
    with pytest.raises(RunFailed, match="7 are needed"):
        late.start(grid, ArrayRecord(tiny_model().state_dict()), 1, timeout=0.3)


def test_a_reply_that_flower_cannot_decode_is_that_of_one_client(tmp_path: Path) -> None:
    def tamper(node: int, message: Message, reply: Message) -> Message:
        if node == 5 and message.metadata.message_type == "train":
            raise ValueError("Unexpected set of `children`")
        return reply

    strategy = prefed.flower.FedAvg(**OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays()), tmp_path, tamper), 1)
    assert result.arrays is not None
    assert "cannot be read" in str(strategy.arrivals.refused[0])


def test_flower_s_dp_wrapper_goes_round(tmp_path: Path) -> None:
    """Without an accountant it works mechanically: what it noised is where we go on from."""
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as Wrapper

    np.random.seed(0)
    strategy = prefed.flower.FedAvg(fraction_evaluate=0.0)
    wrapped = Wrapper(strategy, 0.1, 1.0, 6)
    result = wrapped.start(
        tiny_grid(tiny_app(arrays()), tmp_path), ArrayRecord(tiny_model().state_dict()), 2, 5
    )
    assert result.arrays is not None
    meant = Wrapper(prefed.flower.FedAvg(fraction_evaluate=0.0, mean_of_rounds=1.0), 0.1, 1.0, 6)
    with pytest.raises(PrefedError, match="mean_of_rounds: clients go on from other weights"):
        meant.start(
            tiny_grid(tiny_app(arrays()), tmp_path), ArrayRecord(tiny_model().state_dict()), 2, 5
        )
    with pytest.raises(ValueError, match=r"FedAvg\.aggregate_train"):
        Wrapper(strategy, 0.1, 1.0, 6, accountant=accountant(6))


def accountant(population: int, max_epsilon: float | None = None) -> Any:
    pytest.importorskip("dp_accounting")
    from flwr.supercore.privacy_accounting import (
        NeighboringRelation,
        PrivacyConfig,
        SamplingMethod,
    )
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    return RdpAccountant(
        PrivacyConfig(
            1e-5,
            population,
            NeighboringRelation.ADD_OR_REMOVE_ONE,
            SamplingMethod.NO_AMPLIFICATION,
            max_epsilon,
        )
    )


def test_central_dp(tmp_path: Path) -> None:
    """The noise has the deviation it should, changes are clipped, and P sees only noised means."""
    privacy = prefed.flower.CentralDP(noise_multiplier=0.5, clip_norm=1e-3, seed=0)
    strategy = prefed.flower.PreFedOpt(
        server_lr=0.1, per_step=False, weighting="uniform", privacy=privacy, **OPTIONS
    )
    run(strategy, tiny_grid(tiny_app(arrays()), tmp_path), 1)
    again = prefed.flower.CentralDP(noise_multiplier=0.5, clip_norm=1e-3, seed=0)
    noise = again.noise(torch.zeros(39, dtype=torch.float64), 6, 6)
    P = strategy.server.optimiser["P"]
    assert float(noise.std()) == pytest.approx(0.5 * 1e-3 / 6, rel=0.3)
    # P = (1 - beta2) * (beta1 * g)^2 with g = -(mean + noise), where |mean| <= clip_norm.
    g = (P / 0.01).sqrt() / 0.9
    assert float((g - noise.abs()).abs().max()) <= 1e-3
    clipped = privacy.clip({"weights": torch.full((100,), 5.0)})["weights"]
    assert float(clipped.norm()) == pytest.approx(1e-3)

    with pytest.raises(PrefedError, match="share optimiser state"):
        prefed.flower.PreFed(weighting="uniform", privacy=privacy)
    with pytest.raises(PrefedError, match="uniform"):
        prefed.flower.FedAdam(privacy=privacy)


def test_central_dp_under_flower_s_accounting(tmp_path: Path) -> None:
    from flwr.serverapp.exception import PrivacyBudgetExhausted

    count = accountant(6, max_epsilon=8.0)
    privacy = prefed.flower.CentralDP(noise_multiplier=1.0, clip_norm=1.0, accountant=count)
    strategy = prefed.flower.PreFedOpt(weighting="uniform", privacy=privacy, **OPTIONS)
    with pytest.raises(PrivacyBudgetExhausted):
        run(strategy, tiny_grid(tiny_app(arrays()), tmp_path), 50)
    spent = count.get_privacy_spent()
    assert 0 < spent.num_releases < 50
    assert spent.epsilon <= 8.0
    assert strategy.server.round == spent.num_releases


class Loader:
    """Full batches as flwr-datasets hands them out."""

    def __init__(self, partition: int) -> None:
        x, self.dataset = arrays()[partition]
        self.batch = {"img": torch.tensor(x), "label": torch.tensor(self.dataset)}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([self.batch] * STEPS)


def test_python_of_the_docs(tmp_path: Path) -> None:
    """As it stands there, around a model and a loader; both clients train as in simulation."""
    text = (STOCK.parent.parent / "docs" / "flower.md").read_text()
    names: dict[str, Any] = {
        "Net": tiny_model,
        "load_data": lambda context: (Loader(int(context.node_config["partition-id"])), None),
    }
    apps: list[ClientApp] = []
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        exec(compile(block, "docs/flower.md", "exec"), names)
        if names.get("app") not in (None, *apps):
            apps.append(names["app"])
    assert isinstance(names["strategy"], prefed.flower.Strategy)
    assert names["strategy"].privacy.clip_norm == 0.5
    assert len(apps) == 2
    for app in apps:
        prefed.flower.tell_partition(app)
        options = OPTIONS | {"weighting": "uniform", "local_steps": None}
        strategy = prefed.flower.PreFed(client_lr=0.001, **options)
        result = run(strategy, tiny_grid(app, tmp_path))
        wanted = simulated(prefed.PreFed(client_lr=0.001), weighting="uniform")
        torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-10)


def test_batches_that_are_not_pairs(tmp_path: Path) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        loader: Any = Loader(0)
        reply: Message = prefed.flower.local_train(message, context, tiny_model(), loader)
        return reply

    with pytest.raises(RunFailed, match=r"pairs \(x, y\) or dicts .* not dict; .*batch\[.img.\]"):
        run(prefed.flower.PreFed(fraction_evaluate=0.0, retries=0), tiny_grid(app, tmp_path), 1)


PERSONAL: list[dict[str, Any]] = [
    {"name": "FedPer"}, {"name": "FedRep", "personal": ("body.0.*",)}, {"name": "FedBN"},
    {"name": "PreFed", "personal": ("@last",), "momentum": "derived"},
    {"name": "PreFed", "personal": ("norm.*", "body.*.bias"), "momentum": "keep"},
    {"name": "SCAFFOLD", "personal": ("*.bias",)},
    {"name": "FedAdam", "personal": ("@norm",), "statistics": "keep"},
]  # fmt: skip


@pytest.mark.parametrize("options", PERSONAL, ids=str)
def test_parts_that_stay(options: dict[str, Any], tmp_path: Path) -> None:
    """As in simulation: the model of the server, and that of each client where it is evaluated.
    What a client sends in place of its own part is what it got."""
    options = {"client_lr": 0.01, **options}
    name, app = options.pop("name"), tiny_app(arrays(), "local_train", make=WithBuffers)
    found: dict[int, Any] = {}

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        model = WithBuffers().eval()
        prefed.flower.load_model(message, context, model)
        assert not model.training
        found[context.node_config["partition-id"]] = model.state_dict()
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    first = WithBuffers().state_dict()
    sent: list[dict[str, torch.Tensor]] = []

    def listen(node: int, message: Message, reply: Message) -> Message:
        sent.extend(r.to_torch_state_dict() for k, r in reply.content.array_records.items()
                    if k == "arrays")  # fmt: skip
        return reply

    more: dict[str, Any] = {"fraction_train": 0.5, "fraction_evaluate": 1.0}
    strategy = getattr(prefed.flower, name)(**options, **{**OPTIONS, **more})
    result = run(strategy, tiny_grid(app, tmp_path, listen), make=WithBuffers)
    wanted = prefed.simulate(
        getattr(prefed, name)(**options), WithBuffers(), tiny_data(), rounds=4, local_steps=STEPS,
        batch_size=None, engine="sequential", weighting="samples", clients_per_round=3,
    )  # fmt: skip
    pairs = [(result.arrays.to_torch_state_dict(), wanted.model)]
    pairs += [(found[client], wanted.client_model(client)) for client in range(6)]
    for ours, model in pairs:
        for key, value in model.state_dict().items():
            if not key.endswith("num_batches_tracked"):  # which no evaluation uses
                torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-12)
    assert strategy.shape.personal
    for key in strategy.shape.personal:
        assert all(torch.equal(arrays[key], first[key]) for arrays in sent)
        assert not torch.equal(found[0][key], found[1][key])


def test_what_is_sent_in_place_of_a_part_that_stays_is_not_looked_at(tmp_path: Path) -> None:
    results = []
    for lie in (False, True):

        def tamper(node: int, message: Message, reply: Message, lie: bool = lie) -> Message:
            if lie and "arrays" in reply.content:
                record = cast(ArrayRecord, reply.content["arrays"])
                for name in list(record)[-2:]:
                    record[name] = Array(record[name].numpy() * np.nan)
            return reply

        grid = tiny_grid(tiny_app(arrays(), "local_train"), tmp_path / str(lie), tamper)
        results.append(flat(run(prefed.flower.FedPer(client_lr=LR, **OPTIONS), grid).arrays))
    assert torch.equal(*results)


@pytest.mark.parametrize("helper", ["plain", "covariance"])
@pytest.mark.parametrize("personal", [("@last",), ("0.*", "2.bias")])
def test_an_app_that_sends_all_of_its_model_is_noticed_before_others_train(
    personal: tuple[str, ...], helper: str, tmp_path: Path
) -> None:
    seen: list[str] = []
    grid = tiny_grid(tiny_app(arrays()), tmp_path, counted(seen))
    with pytest.raises(PrefedError, match=r"(?s)should stay with the client .*\.local_train\("):
        run(prefed.flower.FedPer(personal=personal, **WITHOUT_STEPS), grid)
    assert seen == ["question"]


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(SIZES[0], 4), nn.LayerNorm(4), nn.Linear(4, SIZES[2]))
        self.double()


@pytest.mark.parametrize(("strategy", "words"), [
    (lambda: prefed.flower.FedBN(retries=0, **OPTIONS), "'@norm' finds no normalisation layer"),
    (lambda: prefed.flower.FedPer(retries=0, personal=("hea.*",), **OPTIONS),
     "'hea.*' names no parameter"),
    (lambda: prefed.flower.PreFed(retries=0, personal=("1.*",), bias_correction=True, **OPTIONS),
     "bias_correction=False"),
])  # fmt: skip
def test_parts_that_cannot_stay(strategy: Any, words: str, tmp_path: Path) -> None:
    """A server knows the names of parameters, and not which layers are LayerNorm."""
    grid = tiny_grid(tiny_app(arrays(), "local_train", make=Normed), tmp_path)
    with pytest.raises((PrefedError, RunFailed), match=re.escape(words)):
        run(strategy(), grid, 1, make=Normed)
    named = prefed.flower.FedBN(personal=("1.*",), **OPTIONS)
    run(named, tiny_grid(tiny_app(arrays(), "local_train", make=Normed), tmp_path), 1, make=Normed)
    assert named.shape.personal == ["1.weight", "1.bias"]


def test_lockstep_is_refused() -> None:
    with pytest.raises(PrefedError, match="simulation only"):
        prefed.flower.PreFedSync()


def test_nobody_answers_for_another(tmp_path: Path) -> None:
    def tamper(node: int, message: Message, reply: Message) -> Message:
        if node == 5 and message.metadata.message_type == "train":
            reply.metadata.__dict__["_src_node_id"] = 9
        return reply

    strategy = prefed.flower.FedAvg(**OPTIONS)
    run(strategy, tiny_grid(tiny_app(arrays()), tmp_path, tamper), 1)
    assert "node 9 answered for it" in str(strategy.arrivals.refused[0])
