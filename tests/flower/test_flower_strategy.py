"""The drop-in strategies, in one process with real ClientApps."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.clientapp import ClientApp
from torch import nn

import prefed
import prefed.flower
from prefed.core.errors import PrefedError, RunFailed
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
], ids=str)  # fmt: skip
def test_client_side_algorithms_with_local_train(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    name = options.pop("name")
    strategy = getattr(prefed.flower, name)(client_lr=0.01, **options, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "local_train"), tmp_path))
    wanted = simulated(getattr(prefed, name)(client_lr=0.01, **options))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-12)


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
    app = tiny_app(arrays(), helper, WithBuffers)
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


def test_prefed_with_the_optimiser_and_two_lines(tmp_path: Path) -> None:
    strategy = prefed.flower.PreFed(client_lr=LR, **OPTIONS)
    result = run(strategy, tiny_grid(tiny_app(arrays(), "covariance"), tmp_path))
    wanted = simulated(prefed.PreFed(client_lr=LR))
    torch.testing.assert_close(flat(result.arrays), wanted, rtol=0, atol=1e-10)


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


def test_python_of_the_docs() -> None:
    text = (STOCK.parent.parent / "docs" / "flower.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        exec(compile(block, "docs/flower.md", "exec"), names)
    assert isinstance(names["strategy"], prefed.flower.Strategy)
    assert names["strategy"].privacy.clip_norm == 0.5


def test_parts_that_stay_are_refused() -> None:
    with pytest.raises(PrefedError, match=r"FedPer\.personal: .*prefed deploy"):
        prefed.flower.FedPer(client_lr=LR)


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
