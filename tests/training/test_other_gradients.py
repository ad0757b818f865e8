"""Gradients that a rule asks for besides those of its steps, in every engine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import prefed
import prefed.flower
from prefed.core import draws
from prefed.core.layout import Layout
from prefed.core.losses import make_loss
from prefed.rules.rule import OTHER, Other, Rule, State
from prefed.training import other_gradients
from tests.helpers.engine_runs import Net, batchnorm, chain, same
from tests.helpers.problems import SIZES, tiny_data, tiny_model


@dataclass(frozen=True)
class Asking(Rule):
    """SGD that adds up the other gradients it has asked for, in every second step."""

    kind: Other

    def fields(self, layout: Layout) -> dict[str, prefed.Field]:
        return {"seen": prefed.Field((layout.size,))}

    def other(self, k: int) -> Other | None:
        return self.kind if k % 2 == 0 else None

    def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        assert (OTHER in state) == (k % 2 == 0)
        state["seen"].add_(state.get(OTHER, torch.zeros_like(w)))
        w.sub_(g, alpha=lr)


class Asked(prefed.Algorithm):
    client_lr: float = 0.05
    kind: Other = "whole"

    def client_rule(self) -> Rule:
        return Asking(self.kind)

    def sharing(self) -> dict[str, Any]:
        return {"seen": prefed.keep()}


def trained(kind: str, model: nn.Module, engine: str, **settings: Any) -> prefed.Result:
    asked: dict[str, Any] = {"rounds": 2, "local_steps": 3, "batch_size": 4, "device": "cpu"}
    data = settings.pop("data", None) or tiny_data()
    return prefed.simulate(Asked(kind=kind), model, data, engine=engine, **asked | settings)


@pytest.mark.parametrize("kind", ["whole", "drawn"])
@pytest.mark.parametrize("model", [chain(), Net().double(), batchnorm()],
                         ids=["chain", "vmap", "batchnorm"])  # fmt: skip
def test_engines_agree(kind: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, clients of unequal size and unequally many steps, and in several pieces."""
    monkeypatch.setattr(other_gradients, "TOGETHER", 5)
    steps = {"local_steps": None, "local_epochs": 1, "rounds": 2, "drop_last": True}
    one = trained(kind, model, "sequential", **steps)
    same(one, trained(kind, model, "vectorised", **steps), 1e-9)
    two = trained(kind, model, "sequential", workers=2, **steps)
    assert torch.equal(one.weights, two.weights)
    assert all(torch.equal(v["seen"], two.kept[c]["seen"]) for c, v in one.kept.items())


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("together", [1024, 5])
def test_the_whole_gradient(engine: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_gradients, "TOGETHER", together)
    model, data = tiny_model(), tiny_data()
    result = trained("whole", model, engine, rounds=1, local_steps=1)
    for client, kept in result.kept.items():
        x, y = data.client(client).all()
        found = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        wanted = torch.cat([g.flatten() for g in found])
        torch.testing.assert_close(kept["seen"], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("way", ["module", "sum", "function"])
def test_the_whole_gradient_where_targets_do_not_count_alike(
    way: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, of which the first has no target that counts."""
    monkeypatch.setattr(other_gradients, "TOGETHER", 2)
    weight = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)
    ways: dict[str, Any] = {
        "module": nn.CrossEntropyLoss(weight),
        "sum": nn.CrossEntropyLoss(weight, reduction="sum"),
        "function": cross_entropy,
    }
    loss, model, clients = ways[way], tiny_model(), []
    for client in range(2):
        x, y = tiny_data().client(client).all()
        clients.append((x, torch.where(torch.arange(len(y)) < 2, -100, y)))
    data = prefed.FederatedData(clients)
    settings: dict[str, Any] = {"rounds": 1, "local_steps": 1, "batch_size": None}
    result = trained("whole", model, engine, data=data, loss=loss, **settings)
    for client, kept in result.kept.items():
        x, y = clients[client]
        found = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
        wanted = torch.cat([g.flatten() for g in found])
        torch.testing.assert_close(kept["seen"], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("kind", ["whole", "drawn"])
def test_statistics_and_dropout_of_the_steps_are_as_without(kind: str, engine: str) -> None:
    for model in (batchnorm(), chain()):
        asked = trained(kind, model, engine)
        plain = prefed.simulate(
            prefed.FedAvg(client_lr=0.05), model, tiny_data(), rounds=2, local_steps=3,
            batch_size=4, device="cpu", engine=engine,
        )  # fmt: skip
        assert torch.equal(asked.weights, plain.weights)
        assert torch.equal(asked.server.buffers, plain.server.buffers)


def test_labels_are_drawn_from_the_output() -> None:
    """As often as the model's probabilities say, and no label is put where none is."""
    scores = torch.tensor([[2.0, 0.0, -1.0]]).double().expand(20_000, 3).contiguous()
    u = draws.uniform(0, "labels", 0, 0, 0, (20_000,))
    seen: list[Tensor] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.append(y)
        return cross_entropy(output, y)

    y = torch.zeros(20_000, dtype=torch.int64)
    other_gradients.loss_of_drawn(loss, scores, y, u)
    shares = seen[0].bincount(minlength=3) / len(y)
    torch.testing.assert_close(shares.double(), scores[0].softmax(0), rtol=0, atol=0.01)
    y[:15_000] = -1
    ignoring = make_loss("cross_entropy", ignore_index=-1)
    found = other_gradients.loss_of_drawn(ignoring, scores, y, u)
    drawn = seen[0][15_000:]
    torch.testing.assert_close(found, cross_entropy(scores[15_000:], drawn) * 5000**0.5)


def test_the_square_estimates_the_gauss_newton_diagonal() -> None:
    """E[B g^2] = mean over samples of J^T (diag(p) - p p^T) J, in closed form if linear."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator).double()
    W = torch.randn(3, 4, generator=generator).double().requires_grad_()
    y, squares = torch.zeros(6, dtype=torch.int64), []
    for step in range(1500):
        u = draws.uniform(0, "labels", 0, 0, step, (6,))
        loss = other_gradients.loss_of_drawn(cross_entropy, x @ W.T, y, u)
        squares.append(torch.autograd.grad(loss, W)[0].square())
    p = (x @ W.T).softmax(1).detach()
    wanted = torch.einsum("nc,nd->cd", p * (1 - p), x**2) / 6
    torch.testing.assert_close(torch.stack(squares).mean(0), wanted, rtol=0.15, atol=1e-3)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_yes_or_no(engine: str) -> None:
    """Several labels of 0 or 1, drawn one by one."""
    model = nn.Linear(SIZES[0], 2).double()
    x = [a for a, _ in (tiny_data().client(c).all() for c in range(6))]
    clients = [(a, (a[:, :2] > 0).long()) for a in x]
    settings: dict[str, Any] = {"batch_size": None, "loss": "bce", "rounds": 1, "local_steps": 1}
    result = trained("drawn", model, engine, data=prefed.FederatedData(clients), **settings)
    for client, (a, y) in enumerate(clients):
        output = model(a)
        drawn = draws.uniform(0, "labels", 0, client, 0, y.shape) < output.detach().sigmoid()
        loss = binary_cross_entropy_with_logits(output, drawn.double()) * y.numel() ** 0.5
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
        torch.testing.assert_close(result.kept[client]["seen"], wanted, rtol=1e-12, atol=1e-14)


def test_who_cannot_says_so() -> None:
    numbers = prefed.FederatedData([(x, x[:, :3]) for x, _ in (tiny_data().client(0).all(),)])
    with pytest.raises(prefed.PrefedError, match="the loss has to be cross_entropy or bce"):
        trained("drawn", tiny_model(), "sequential", data=numbers)
    with pytest.raises(prefed.PrefedError, match="the loss has to be cross_entropy or bce"):
        trained("drawn", tiny_model(), "sequential", loss=lambda output, y: output.sum())

    class OnServer(prefed.Algorithm):
        client_lr: float = 0.05

        def server_rule(self) -> Rule:
            return Asking("whole")

    with pytest.raises(prefed.PrefedError, match="only clients have"):
        prefed.simulate(OnServer(), tiny_model(), tiny_data(), rounds=1, local_steps=1)
    with pytest.raises(prefed.PrefedError, match="Flower app of one's own does not have"):
        prefed.flower.MimeLite()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_compiled_engine_runs_as_the_vectorised_one() -> None:
    with pytest.warns(prefed.EngineWarning, match="more than one gradient in a step"):
        compiled = trained("whole", tiny_model(), "compiled")
    same(compiled, trained("whole", tiny_model(), "vectorised"), 0.0)
