"""Every engine against the sequential one, for every registered algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import prefed
from prefed.training.engines import linear_chains
from prefed.training.engines.block_losses import by_vmap
from prefed.training.engines.vectorised import Vectorised
from prefed.training.keyed_dropout import KeyedDropout, dropout, keys
from prefed.training.mean import Mean
from tests.helpers.engine_runs import Net, batchnorm, chain, run, same
from tests.helpers.problems import SIZES, WITHOUT_NORMS, tiny_data


@pytest.mark.parametrize("model", [chain(), Net().double()], ids=["chain", "vmap"])
@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_vectorised_equals_sequential_in_float64(name: str, model: nn.Module) -> None:
    """10 rounds with unequal clients, partial participation and dropout."""
    same(run(name, model, "sequential"), run(name, model, "vectorised"), 1e-9)


@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefedsync", "scaffold"])
def test_vectorised_with_full_batches_of_unequal_size(name: str) -> None:
    """Clients of one size are grouped: six sizes, one of them three times."""
    clients = [(x[:n], y[:n]) for (x, y), n in zip(tiny_pairs(), (7, 12, 7, 9, 7, 6), strict=True)]
    options: dict[str, Any] = {
        "data": prefed.FederatedData(clients, test=clients[0]),
        "batch_size": None,
        "weighting": "samples",
        "clients_per_round": 5,
    }
    same(
        run(name, chain(), "sequential", **options),
        run(name, chain(), "vectorised", **options),
        1e-9,
    )


def tiny_pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, SIZES[0], dtype=torch.float64, generator=generator)
    return [(a, torch.arange(20) % SIZES[2]) for a in x]


def test_vectorised_in_float32_has_the_same_cohorts_and_curves() -> None:
    for name in ("fedavg", "prefed"):
        model = chain(torch.float32)
        a, b = run(name, model, "sequential"), run(name, model, "vectorised")
        same(a, b, 1e-3)
        assert not torch.equal(a.weights, chain_weights(model))


def chain_weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_blocks_of_any_size_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("scaffold", chain(), "vectorised", clients_per_round=None)
    for most in (1, 2, 5):
        monkeypatch.setattr(Vectorised, "most_clients", most)
        same(run("scaffold", chain(), "vectorised", clients_per_round=None), expected, 1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefedsync", "scaffold"])
def test_bits_do_not_depend_on_the_number_of_workers(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vectorised, "most_clients", 2)  # several blocks in so small a cohort
    options: dict[str, Any] = {"clients_per_round": 5, "weighting": "samples", "rounds": 5}
    one = run(name, chain(), engine, **options)
    for workers in (2, 3):
        other = run(name, chain(), engine, workers=workers, **options)
        assert torch.equal(one.weights, other.weights)
        assert [r["train_loss"] for r in one.history] == [r["train_loss"] for r in other.history]


def test_batchnorm_is_vectorised_with_its_buffers() -> None:
    a, b = run("fedavg", batchnorm(), "sequential"), run("fedavg", batchnorm(), "vectorised")
    same(a, b, 1e-9)
    assert a.server.buffers.numel() == 8  # means and variances
    assert a.server.buffers.abs().max() > 0
    assert a.model[1].num_batches_tracked == b.model[1].num_batches_tracked == 30  # type: ignore


class Recurrent(nn.Module):
    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, SIZES[2])
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x[:, :, None])
        noise = torch.randn(4, dtype=out.dtype) if self.noise and self.training else 0.0
        head: Tensor = self.head(out[:, -1] + noise)
        return head


@pytest.mark.parametrize("noise", [False, True])
def test_what_cannot_be_vectorised_falls_back_with_one_line(noise: bool) -> None:
    torch.manual_seed(0)
    model = Recurrent(noise).double()
    with pytest.warns(
        prefed.EngineWarning, match="generator" if noise else "cannot be vectorised"
    ) as seen:
        result = run("fedavg", model, "vectorised", rounds=2)
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    assert torch.equal(result.weights, run("fedavg", model, "sequential", rounds=2).weights)


def test_a_model_with_draws_of_its_own_has_one_worker() -> None:
    model = Recurrent(noise=True).double()
    with pytest.warns(prefed.EngineWarning, match="one worker"):
        result = run("fedavg", model, "sequential", rounds=2, workers=2)
    assert torch.equal(result.weights, run("fedavg", model, "sequential", rounds=2).weights)


def test_batched_products_equal_vmap() -> None:
    """The fast forward pass against the simple one, gradients included."""
    simulation = prefed.Simulation(
        prefed.FedAvg(),
        chain(),
        tiny_data(),
        prefed.Settings(rounds=1, local_steps=1, device="cpu"),
    )
    task, generator = simulation.task, torch.Generator().manual_seed(0)
    engine = Vectorised(task, simulation.data, simulation.settings)
    assert linear_chains.plan(task.flat.module) is not None
    weights = {
        name: torch.randn(3, *p.shape, generator=generator, dtype=p.dtype).requires_grad_()
        for name, p in task.flat.module.named_parameters()
    }
    x = torch.randn(3, 6, SIZES[0], generator=generator, dtype=torch.float64)
    y = torch.randint(SIZES[2], (3, 6), generator=generator)
    outcomes = []
    for losses in (engine.losses, by_vmap(task)):
        found = losses(weights, {}, x, y, keys([1, 2, 3], task.device))
        outcomes.append((found, *torch.autograd.grad(found.sum(), list(weights.values()))))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)],
        [nn.Flatten(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 4)],
        [nn.Linear(6, 7), nn.Sigmoid(), nn.Identity(), nn.Linear(7, 7), nn.Tanh(), nn.ReLU(),
         nn.Sequential(nn.Linear(7, 4, bias=False))],
        [nn.Linear(6, 4)],
    ],
)  # fmt: skip
def test_gradients_by_hand_equal_autograd(layers: list[nn.Module]) -> None:
    model = nn.Sequential(*layers).double()
    differentiate = linear_chains.plan_gradient(model)
    assert differentiate is not None
    x = torch.randn(3, 8, 6, dtype=torch.float64)
    if isinstance(layers[0], nn.Flatten):
        x = x.view(3, 8, 2, 3)
    y = torch.randint(4, (3, 8))
    rows = torch.randn(3, 500, dtype=torch.float64)  # room inside wider rows, as in the engine
    names = {n: (p.shape, p.numel()) for n, p in model.named_parameters()}
    weights, room, at = {}, {}, 7
    for name, (shape, count) in names.items():
        weights[name] = torch.randn(3, *shape, dtype=torch.float64)
        room[name] = rows[:, at : at + count].view(3, *shape)
        at += count
    outside = torch.cat([rows[:, :7], rows[:, at:]], 1)
    losses = differentiate(weights, room, x, y)
    for client in range(3):
        own = {n: w[client].requires_grad_() for n, w in weights.items()}
        loss = cross_entropy(torch.func.functional_call(model, own, (x[client],)), y[client])
        torch.testing.assert_close(losses[client], loss.detach(), rtol=1e-12, atol=1e-12)
        for name, gradient in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            torch.testing.assert_close(room[name][client], gradient, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat([rows[:, :7], rows[:, at:]], 1), outside)


def test_gradients_by_hand_are_for_what_they_know() -> None:
    for layers in (
        [nn.Linear(6, 4), nn.ReLU()],
        [nn.ReLU(), nn.Linear(6, 4)],
        [nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4)],
        [nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4)],
        [nn.Linear(6, 5), nn.Flatten(), nn.Linear(5, 4)],
        [nn.Conv1d(1, 1, 1), nn.Linear(5, 4)],
        [],
    ):
        assert linear_chains.plan_gradient(nn.Sequential(*layers)) is None


def test_models_the_fast_path_does_not_know() -> None:
    twice = nn.Linear(3, 3)
    for model in (
        nn.Sequential(twice, nn.ReLU(), twice),
        nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Flatten(0), nn.Linear(3, 3)),
        Net(),
    ):
        assert linear_chains.plan(model) is None
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    assert linear_chains.plan(hooked) is None


def test_keyed_dropout_drops_the_right_share_and_depends_on_its_key() -> None:
    x, (a, b) = torch.ones(200, 500), keys([7, 8], torch.device("cpu"))
    for p in (0.1, 0.5, 0.8):
        dropped = dropout(x, p, a, 1)
        assert abs(float((dropped == 0).double().mean()) - p) < 0.01
        assert abs(float(dropped.mean()) - 1) < 0.02
        per_row = (dropped == 0).double().mean(1)
        assert abs(float(per_row.var()) - p * (1 - p) / 500) < 0.4 * p * (1 - p) / 500
        for other in (dropout(x, p, b, 1), dropout(x, p, a, 2)):
            both = ((dropped == 0) & (other == 0)).double().mean()
            assert abs(float(both) - p * p) < 0.01
    assert torch.equal(dropout(x, 0.5, a, 1), dropout(x, 0.5, a, 1))
    stacked = dropout(torch.stack([x, x]), 0.5, torch.stack([a, b]), 3)
    assert torch.equal(stacked[1], dropout(x, 0.5, b, 3))
    assert not dropout(x, 1.0, a, 1).any()


def test_keyed_dropout_catches_modules_and_functions() -> None:
    x = torch.ones(4, 6, 5, 5)
    with KeyedDropout(keys([3], torch.device("cpu"))[0]) as mode:
        whole = nn.Dropout2d(0.5)(x)
        assert torch.equal(nn.functional.dropout(x, 0.5, training=False), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        torch.dropout(x, 0.5, train=True)
    assert mode.calls == 2
    per_channel = whole.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert 0 < int((per_channel[..., 0] == 0).sum()) < 24


@pytest.mark.parametrize("first", [0, 1, 3, 6])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13])
def test_the_mean_of_a_block_has_the_bits_of_its_clients(first: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(first + rows, 7, generator=generator) * 1e3
    for weights in ([1.0] * len(values), [float(1 + i % 3) for i in range(len(values))]):
        single, block = Mean(), Mean()
        for i, value in enumerate(values):
            single.add(i, {"w": value}, weights[i], float(i))
            if i < first:
                block.add(i, {"w": value}, weights[i], float(i))
        given = values[first:].clone()
        losses = [float(i) for i in range(first, len(values))]
        block.add_block(first, {"w": given}, weights[first:], losses)
        (a, loss), (b, same_loss) = single.result(), block.result()
        assert torch.equal(a["w"], b["w"])
        assert loss == same_loss
        assert torch.equal(given, values[first:])


@pytest.mark.parametrize(("width", "dtype"), [(7, torch.float32), (6, torch.float64)])
def test_clients_of_different_kinds_are_refused(width: int, dtype: torch.dtype) -> None:
    class Odd:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, client: int) -> Any:
            odd = client == 3
            x = torch.randn(5, width if odd else 6, dtype=dtype if odd else torch.float32)
            return x, torch.zeros(5, dtype=torch.long)

    words = r"clients\[3\]: (its samples are not of the shape|.* must have the same dtypes)"
    with pytest.raises(prefed.PrefedError, match=words):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), nn.Linear(6, 2), prefed.FederatedData(Odd()),
            rounds=1, local_steps=2, batch_size=4, engine="vectorised",
        )  # fmt: skip
