"""prefed.optim.Covariance in an ordinary training loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.layout import Layout
from prefed.optim import Covariance
from prefed.rules import Covariance as Rule


def train(model: nn.Module, optimiser: Any, steps: int, scheduler: Any = None) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(8, 3, generator=generator)
        optimiser.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimiser.step()
        if scheduler:
            scheduler.step()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("options", [{}, {"bias_correction": True}, {"accumulate": "sum"}])
def test_it_is_the_rule(options: dict[str, Any]) -> None:
    w = torch.randn(20, dtype=torch.float64)
    parameter = nn.Parameter(w.clone())
    optimiser = Covariance([parameter], lr=0.01, betas=(0.8, 0.95), tau=1e-2, **options)
    rule = Rule(0.8, 0.95, 1e-2, **options)
    fields = rule.fields(Layout.of([("w", w)]))
    state = {name: field.new(w) for name, field in fields.items()}
    for k in range(10):
        g = torch.randn(20, dtype=torch.float64)
        parameter.grad = g.clone()
        optimiser.step()
        rule.step(w, g, state, 0.01, k)
        assert torch.equal(parameter.grad, g)
    assert torch.equal(parameter.detach(), w)
    assert optimiser.state[parameter].keys() == state.keys()


def test_it_trains_and_weight_decay_pulls_to_zero() -> None:
    model = net()
    train(model, Covariance(model.parameters(), lr=0.01), 300)
    x = torch.randn(64, 3)
    assert (model(x) - x.sum(1, keepdim=True)).square().mean() < 0.3
    parameter = nn.Parameter(torch.ones(3))
    optimiser = Covariance([parameter], lr=0.1, weight_decay=0.5)
    for _ in range(20):
        parameter.grad = torch.zeros(3)
        optimiser.step()
    assert (parameter < 1).all()


def test_state_dict_round_trip() -> None:
    """Stop half way, save, load into fresh objects: the same bits as without a stop."""
    whole = net()
    train(whole, Covariance(whole.parameters(), lr=0.01, bias_correction=True), 20)
    first = net()
    optimiser = Covariance(first.parameters(), lr=0.01, bias_correction=True)
    generator = torch.Generator().manual_seed(0)
    second, restored = first, optimiser
    for step in range(20):
        if step == 10:
            second = net()
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            restored = Covariance(second.parameters(), lr=1.0, bias_correction=True)
            restored.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        x = torch.randn(8, 3, generator=generator)
        restored.zero_grad()
        (second(x) - x.sum(1, keepdim=True)).square().mean().backward()
        restored.step()
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameter_groups_and_schedulers() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},  # type: ignore[index]
        {"params": model[2].parameters(), "betas": (0.5, 0.5), "tau": 1.0},  # type: ignore[index]
    ]
    optimiser = Covariance(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, step_size=1, gamma=0.1)
    train(model, optimiser, 3, scheduler)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, True]
    assert optimiser.param_groups[1]["lr"] == pytest.approx(1e-5)


def test_closure() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimiser = Covariance([parameter], lr=0.01)

    def closure() -> float:
        optimiser.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimiser.step(closure) == 4.0
    assert parameter < 2


def test_what_it_cannot_do_it_says() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(prefed.PrefedError, match="sparse"):
        Covariance(embedding.parameters()).step()
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weight.abs().sum().backward()
    with pytest.raises(prefed.PrefedError, match="complex"):
        Covariance([weight]).step()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1}, "lr"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"tau": 0}, "tau"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"accumulate": "mean"}, "accumulate"),
    ]
    for options, name in bad:
        with pytest.raises(prefed.PrefedError, match=f"^{name}: "):
            Covariance([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_single_number_is_a_parameter(bias_correction: bool) -> None:
    number, row = (torch.nn.Parameter(torch.full(shape, 2.0)) for shape in ((), (1,)))
    for parameter in (number, row):
        optimiser = prefed.optim.Covariance([parameter], bias_correction=bias_correction)
        for _ in range(3):
            parameter.grad = 3 * parameter.detach()
            optimiser.step()
    assert number.shape == ()
    assert number.item() == row.item() != 2.0


@pytest.mark.parametrize(
    "wrong",
    [{"tau": 0.0}, {"accumulate": "smu"}, {"lr": -1.0}, {"betas": (0.9, 0.9, 0.9)}, {"betas": 0.9}],
    ids=str,
)
def test_options_of_a_group_are_checked(wrong: dict[str, object]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(prefed.PrefedError, match=f"^{next(iter(wrong))}: should be"):
        prefed.optim.Covariance([{"params": [parameter], **wrong}])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_masses_grow_in_half_precision(dtype: torch.dtype) -> None:
    """Also after the state was loaded, which torch rounds to the type of the parameter."""
    weight = nn.Parameter(torch.zeros(8, dtype=dtype))
    options: dict[str, Any] = {"betas": (0.9, 0.999), "bias_correction": True}
    optimiser = prefed.optim.Covariance([weight], **options)
    for _ in range(700):
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    other = prefed.optim.Covariance([weight], **options)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for one in (optimiser, other):
        assert float(one.state[weight]["P_mass"]) == pytest.approx(1 - 0.999**700, rel=1e-4)
