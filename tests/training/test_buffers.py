"""Buffers: what training changes travels, in its own type; all else is left alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import prefed
from prefed.experiments.config import load
from prefed.experiments.run_directory import execute
from tests.helpers.oracles.modules import check_same, federated
from tests.helpers.problems import CLIENT_SIZES, SIZES, tiny_data
from tests.helpers.run_folders import whole_and_resumed

COMPILED = pytest.param(
    "compiled",
    marks=[
        pytest.mark.process,
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for c"),
        pytest.mark.skipif(
            not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler"
        ),
    ],
)
ENGINES = ["sequential", "vectorised", COMPILED]


class Attention(nn.Module):
    """Each input a token; a causal mask, rotary embeddings, and constants of every kind."""

    causal: Tensor
    rotary: Tensor

    def __init__(self, classes: int = SIZES[2]) -> None:
        super().__init__()
        torch.manual_seed(4)
        tokens, width = SIZES[0], 4
        self.embed, self.head = nn.Linear(1, width), nn.Linear(width, classes)
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)
        angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.01])
        self.register_buffer("causal", mask)
        self.register_buffer("rotary", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("exact", angles.double().div(3))
        self.register_buffer("pairs", torch.polar(torch.ones(2).double(), angles[1].double()))
        self.register_buffer("large", torch.tensor([2**24 + 1, 2**62 + 1]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("not_a_number", torch.tensor(torch.nan))
        self.register_buffer("cache", torch.full((3,), torch.inf), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        turned = torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2))) * self.rotary)
        h = turned.flatten(-2)
        scores = (h @ h.transpose(-1, -2) + self.causal).softmax(-1)
        out: Tensor = self.head((scores @ h).mean(-2))
        return out


def simulate(algorithm: prefed.Algorithm, model: nn.Module, **options: Any) -> prefed.Result:
    settings: dict[str, Any] = {"rounds": 3, "local_steps": 2, "batch_size": None, "device": "cpu"}
    dtype = next(model.parameters()).dtype
    return prefed.simulate(algorithm, model, tiny_data(dtype), **settings | options)


@pytest.mark.parametrize("engine", ENGINES)
def test_constants_of_every_kind_survive_and_cost_nothing(engine: str) -> None:
    model = Attention()
    result = simulate(prefed.FedAvg(), model, engine=engine, batch_size=4)
    weights = sum(p.numel() for p in model.parameters())
    for record in result.history:
        assert record["bytes_up"] == record["bytes_down"] == 4 * weights * len(CLIENT_SIZES)
    assert not torch.equal(result.model.embed.weight, model.embed.weight)  # type: ignore
    before, after = dict(model.named_buffers()), dict(result.model.named_buffers())
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        bits = [b.reshape(-1).view(torch.uint8) for b in (value, after[name])]
        assert torch.equal(*bits), name


def make_attention() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, SIZES[0]), Attention(10))


def test_constants_are_saved_with_the_model_and_in_no_checkpoint(tmp_path: Path) -> None:
    changes = ["rounds=2", "local_steps=1", "clients_per_round=2", "device=cpu", "algorithm=fedavg",
               "engine=sequential", f"model={__name__}:make_attention"]  # fmt: skip
    config = load("digits-noniid", changes)
    result = execute(config, tmp_path / "run")
    saved = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    wanted = result.model.state_dict()
    assert "2.cache" not in wanted
    wanted["2.pairs"] = torch.view_as_real(wanted["2.pairs"])
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[n].nan_to_num(), v.nan_to_num()) for n, v in wanted.items())
    state = tmp_path / "run" / "checkpoints" / "000002" / "state.safetensors"
    assert safetensors.torch.load_file(state)["buffers"].numel() == 0


def norm_net(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, SIZES[0])), nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * SIZES[0], SIZES[2]),
    ).double()  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "momentum"), [("sequential", 0.1), ("sequential", None), ("vectorised", 0.1)]
)
@pytest.mark.parametrize("statistics", ["average", "keep", "reset"])
def test_policies_against_plain_pytorch(engine: str, statistics: Any, momentum: Any) -> None:
    """Without a momentum, statistics are means over all batches, and go by the counter."""
    model = norm_net(momentum)
    options: dict[str, Any] = {"engine": engine, "clients_per_round": 4, "rounds": 4}
    result = simulate(prefed.FedAvg(client_lr=0.1, statistics=statistics), model, **options)
    cohorts, clients = [r["cohort"] for r in result.history], tiny_data()
    samples = [clients.client(i).all() for i in range(len(clients))]
    wanted, used = federated(model, samples, cohorts, 0.1, 2, statistics=statistics)
    check_same(result.model, wanted)
    for client, state in result.kept.items():
        module: Any = used[client]
        norm = module[2]
        rows = torch.cat([norm.running_mean, norm.running_var])
        torch.testing.assert_close(state["buffers"], rows, rtol=0, atol=1e-10)
        assert state["buffer_steps"] == norm.num_batches_tracked
    assert bool(result.kept) == (statistics == "keep")
    weights = 8 * sum(p.numel() for p in model.parameters())
    sent = weights + (8 * 8 if statistics == "average" else 0)  # 4 means, 4 variances, no counter
    assert {r["bytes_up"] for r in result.history} == {4 * sent}
    assert {r["bytes_down"] for r in result.history} == {4 * sent}


@pytest.mark.parametrize("statistics", ["average", "keep", "reset"])
def test_policies_in_lockstep_and_on_several_workers(statistics: Any) -> None:
    algorithm: prefed.Algorithm = prefed.PreFedSync(client_lr=0.02, statistics=statistics)
    one, other = (simulate(algorithm, norm_net(), engine=e) for e in ("sequential", "vectorised"))
    check_same(one.model, other.model, 1e-9)
    algorithm = prefed.PreFed(client_lr=0.005, statistics=statistics)
    one, other = (simulate(algorithm, norm_net(), engine="sequential", workers=w) for w in (1, 2))
    check_same(one.model, other.model, 0)
    assert one.kept.keys() == other.kept.keys()


@pytest.mark.parametrize("statistics", ["average", "keep", "reset"])
def test_a_resumed_run_has_the_same_bits(statistics: str, tmp_path: Path) -> None:
    changes = ["rounds=4", "local_steps=2", "clients_per_round=3", "device=cpu",
               "engine=sequential", "algorithm=fedavg", f"statistics={statistics}", "model=resnet8",
               "model.width=2", "model.norm=batch", "data.split.clients=5"]  # fmt: skip
    config = load("digits-noniid", changes)
    whole, cut = whole_and_resumed(config, tmp_path)
    check_same(cut.model, whole.model, 0)
    assert [r["train_loss"] for r in cut.history] == [r["train_loss"] for r in whole.history]
    assert cut.kept.keys() == whole.kept.keys()
    for client, state in whole.kept.items():
        assert all(torch.equal(value, cut.kept[client][name]) for name, value in state.items())


class Tracker(nn.Module):
    """Two layers and a moving average, from the `after`-th training pass on."""

    ema: Tensor
    seen: Tensor

    def __init__(
        self, after: int = 0, count: str = "steps", dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(SIZES[0], 4), nn.Tanh(), nn.Linear(4, SIZES[2]))
        self.after, self.count, self.passes = after, count, 0
        self.register_buffer("ema", torch.zeros(2, dtype=dtype))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.seen += 1 if self.count == "steps" else len(x)
            if self.passes > self.after:
                self.ema = self.ema * 0.5 + x.mean().detach() / 3  # another tensor in its place
        out: Tensor = self.body(x)
        return out


def test_a_statistic_of_one_s_own_is_found_and_averaged_in_its_own_type() -> None:
    """It is float64 in a model of float32, and a forward pass puts a new tensor in its place."""
    model = Tracker(dtype=torch.float64)
    result = simulate(prefed.FedAvg(), model, engine="sequential", clients_per_round=2)
    assert result.server.buffers.dtype == torch.float64
    assert result.history[0]["bytes_up"] == 2 * (4 * result.weights.numel() + 2 * 8)
    ema = torch.zeros(2, dtype=torch.float64)
    for record in result.history:
        ends = []
        for client in record["cohort"]:
            x, end = tiny_data(torch.float32).client(client).all()[0], ema
            for _ in range(2):
                end = end * 0.5 + x.mean() / 3
            ends.append(end)
        ema = torch.stack(ends).mean(0)
    torch.testing.assert_close(result.model.ema, ema, rtol=0, atol=1e-15)
    assert result.model.seen == 6


def test_a_buffer_that_changes_late_is_noticed_and_can_be_named() -> None:
    with pytest.raises(prefed.PrefedError, match=r"ema changed in .*prefed_statistics = \['ema'\]"):
        simulate(prefed.FedAvg(), Tracker(after=5), engine="sequential")
    model = Tracker(after=5)
    model.prefed_statistics = ["em*"]  # type: ignore[assignment]
    assert simulate(prefed.FedAvg(), model, engine="sequential").server.buffers.abs().min() > 0
    for wrong in ("emma", "seen"):
        model.prefed_statistics = [wrong]  # type: ignore[assignment]
        with pytest.raises(prefed.PrefedError, match=f"{wrong}.*floating-point buffers.*ema"):
            simulate(prefed.FedAvg(), model)


def test_an_integer_that_counts_something_else_than_steps_is_refused() -> None:
    with pytest.raises(prefed.PrefedError, match=r"the buffer seen .*int64.*floating-point buffer"):
        simulate(prefed.FedAvg(), Tracker(count="samples"))


def test_layers_whose_statistics_rest_send_none() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    for layer in (Frozen(4), nn.BatchNorm1d(4, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(SIZES[0], 4), layer, nn.Linear(4, SIZES[2]))
        assert simulate(prefed.FedAvg(), model).server.buffers.numel() == 0
    x = torch.zeros(8, SIZES[0])  # statistics that the samples do not change are found all the same
    data = prefed.FederatedData([(x, torch.zeros(8, dtype=torch.long))])
    model = nn.Sequential(nn.BatchNorm1d(SIZES[0]), nn.Linear(SIZES[0], SIZES[2]))
    result = prefed.simulate(prefed.FedAvg(), model, data, rounds=1, local_steps=1, device="cpu")
    assert result.server.buffers.numel() == 2 * SIZES[0]


def test_the_policy_is_checked_like_any_option() -> None:
    with pytest.raises(prefed.PrefedError, match=r"FedAvg\.statistics"):
        prefed.FedAvg(statistics="mean")
    with pytest.raises(prefed.PrefedError, match="statistics"):
        load("digits-noniid", ["algorithm=prefed", "statistics=sometimes"])
