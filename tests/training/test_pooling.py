"""The faster max-pooling against torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import prefed
from prefed.models.simple_cnn import simple_cnn
from prefed.training import pooling, task
from prefed.training.pooling import FastPooling, PoolsFirst, max_pool, pool_before_relu
from prefed.training.task_trial import try_out


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What goes the fast way from now on, which all that can does."""
    seen: list[Tensor] = []

    def watch(x: Tensor) -> Tensor:
        seen.append(x)
        return max_pool(x)

    monkeypatch.setattr(pooling, "WORTH_IT", 0)
    monkeypatch.setattr(task, "WORTH_IT", 1)
    monkeypatch.setattr(pooling, "max_pool", watch)
    return seen


def both(x: Tensor, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Values and gradients, of ours and of torch's."""
    found = []
    for pool in (max_pool, lambda x: functional.max_pool2d(x, 2)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        given = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(seed))
        found.append((y.detach(), torch.autograd.grad(y, leaf, given)[0]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(5, 3, 8, 8), (2, 6, 7, 9), (1, 2, 2, 3), (3, 4, 5, 2), (2, 2, 4, 300)]
)
def test_it_has_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Odd sizes, one sample, rows that are longer than a byte counts."""
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for values in (x, x.relu(), (3 * x).round()):  # few ties, windows of zeros, many ties
        ours, theirs = both(values)
        assert all(map(torch.equal, ours, theirs))


def test_the_first_of_equal_numbers_gets_the_gradient() -> None:
    """Every window of the numbers 0, 1 and 2."""
    x = torch.cartesian_prod(*[torch.arange(3.0)] * 4).view(81, 1, 2, 2).expand(-1, 2, -1, -1)
    ours, theirs = both(x.contiguous())
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_go_torch_s_way(value: float) -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2, 3] = x[1, 0, 0, 0] = x[1, 0, 0, 1] = value
    for ours, theirs in zip(*both(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_it_can_be_differentiated_twice() -> None:
    x = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: max_pool(x).square(), x)


class Pools(nn.Module):
    """Pools as modules and as functions have it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.pool, self.options = nn.MaxPool2d(2, **options), options

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        by_name = functional.max_pool2d(x, kernel_size=2, **self.options)
        return self.pool(x), by_name, torch.max_pool2d(x, [2, 2], **self.options)


@pytest.mark.parametrize(
    ("options", "fast"),
    [
        ({}, 3),
        ({"stride": 2}, 3),
        ({"stride": 1}, 0),
        ({"padding": 1}, 0),
        ({"ceil_mode": True}, 0),
    ],
)
def test_calls_are_caught_wherever_they_are(
    options: dict[str, Any], fast: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watched(monkeypatch)
    x, model = torch.randn(2, 3, 7, 7), Pools(**options)
    for given in (x, x.to(memory_format=torch.channels_last), x[0], x.bfloat16(), x[:, :1]):
        plain = model(given)
        with FastPooling():
            assert all(map(torch.equal, model(given), plain))
    assert len(calls) == fast, "of the first alone"


def test_a_run_has_the_same_bits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and evaluation, on two workers, against torch's pooling."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 1, 17, 16, generator=generator), torch.arange(24) % 3
    data = prefed.FederatedData([(x[:12], y[:12]), (x[12:], y[12:])], test=(x, y))

    def run() -> Tensor:
        torch.manual_seed(0)
        model = simple_cnn((1, 17, 16), 3)
        settings: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 4, "workers": 2}
        result = prefed.simulate(
            prefed.PreFed(), model, data, engine="sequential", device="cpu", **settings
        )
        return torch.cat([result.weights, torch.tensor([r["test_loss"] for r in result.history])])

    plain = run()
    used = watched(monkeypatch)
    assert torch.equal(run(), plain)
    assert used


Between = Callable[[Tensor, Tensor], object]
"""What is done with the input and the output of a ReLU before it is pooled."""


class Net(nn.Module):
    """ReLU and pooling as modules and as functions, some of them with something between."""

    def __init__(self, pool: nn.Module, between: Between | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), pool)
        self.second, self.last, self.between = nn.Conv2d(16, 4, 2), nn.LazyLinear(3), between

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        y = functional.relu(x)
        if self.between is not None:
            self.between(x, y)
        both = functional.max_pool2d(y, 2, stride=1).flatten(1), y.flatten(1)
        scores: Tensor = self.last(torch.cat(both, 1))
        return scores


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.MaxPool2d(2, stride=1, dilation=2),
        nn.MaxPool2d((3, 2), ceil_mode=True),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "between", [None, lambda x, _: x.detach().neg_(), lambda _, y: y.retain_grad()]
)
def test_relu_behind_pooling_has_the_same_bits(
    pool: nn.Module, channels_last: bool, between: Between | None
) -> None:
    """Ties, windows without a positive number, windows that overlap, NaN and infinity; ReLU that is
    used twice, whose input is written to before it is pooled, or that is asked for its gradient."""
    torch.manual_seed(0)
    model = Net(pool, between)
    x = (2 * torch.randn(4, 2, 11, 9)).round() - 1
    model(x)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
    for number in (0.0, torch.inf, torch.nan):
        x[0, 0, 3, 3] = number
        found = []
        for around in (nullcontext(), FastPooling()):
            model.zero_grad()
            with around:
                y = model(x)
            functional.cross_entropy(y, torch.arange(4) % 3).backward()
            found.append([y, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_relu_is_differentiated_after_pooling_alone() -> None:
    conv, x = nn.Conv2d(1, 2, 3), torch.randn(2, 1, 8, 8)
    with FastPooling() as mode:
        y = functional.max_pool2d(functional.relu(conv(x)), 2)
    assert mode.largest == 2 * 2 * 6 * 6
    assert type(y.grad_fn).__name__ == "ReluBackward0"
    (before, _), *_ = y.grad_fn.next_functions  # type: ignore[union-attr]
    (convolution, _), *_ = before.next_functions  # type: ignore[union-attr]
    assert type(convolution).__name__ == "ConvolutionBackward0"


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.MaxPool2d(2, stride=1, dilation=2),
        nn.MaxPool2d((3, 2), ceil_mode=True),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_neighbours_that_change_places_have_the_same_bits(pool: nn.Module, inplace: bool) -> None:
    """Ties, windows without a positive number, windows that overlap, NaN and infinity."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(inplace), pool)
    plain = nn.Sequential(inner, nn.Flatten(), nn.LazyLinear(3))
    x = (2 * torch.randn(4, 2, 11, 9)).round() - 1
    plain(x)
    swapped = copy.deepcopy(plain)
    pool_before_relu(swapped)
    assert type(swapped[0]) is PoolsFirst
    assert [type(layer) for layer in swapped[0]] == [type(layer) for layer in inner]
    for number in (0.0, torch.inf, torch.nan):
        x[0, 0, 3, 3] = number
        found = []
        for model in (plain, swapped):
            model.zero_grad()
            y = model(x)
            functional.cross_entropy(y, torch.arange(4) % 3).backward()
            found.append([y, *(p.grad for p in model.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_a_model_is_given_back_as_it_was_written() -> None:
    x, y = torch.randn(6, 1, 17, 16), torch.arange(6) % 3
    model = simple_cnn((1, 17, 16), 3)
    data, settings = (
        prefed.FederatedData([(x, y)]),
        prefed.Settings(rounds=1, local_steps=1, device="cpu"),
    )
    run = prefed.Run(prefed.FedAvg(client_lr=0.1), model, data, settings)
    module = run.task.flat.module
    assert type(module) is PoolsFirst
    assert type(run.task.copy(run.data).flat.module) is PoolsFirst
    assert type(model) is type(run.model()) is nn.Sequential
    assert torch.equal(run.model()(x), model(x))
    assert run.config["model"]["python"] == "Sequential", "runs of earlier versions are known again"


def test_where_somebody_listens_nothing_is_swapped() -> None:
    for listened in (1, 2):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
        model[listened].register_forward_hook(lambda *_: None)
        pool_before_relu(model)
        assert type(model) is nn.Sequential
    for layers in ([nn.Tanh(), nn.MaxPool2d(2)], [nn.ReLU(), nn.MaxPool2d(2, return_indices=True)]):
        pool_before_relu(model := nn.Sequential(*layers))
        assert type(model) is nn.Sequential, "tanh makes ties of its own"


def test_a_part_of_a_chain_and_a_relu_that_changes_its_input_are_as_they_are_written() -> None:
    chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(2, 1, 8, 8)
    first = chain[:2](x)
    pool_before_relu(chain)
    assert torch.equal(chain[:2](x), first)
    changing = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
    pool_before_relu(changing)
    assert type(changing) is nn.Sequential


def test_activations_that_are_computed_again_on_the_way_back() -> None:
    """As torch.utils.checkpoint does, which compares how many tensors each pass has saved."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

        def pooled(self, x: Tensor) -> Tensor:
            return functional.max_pool2d(functional.relu(self.first(x)), 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Any = checkpoint(self.pooled, x, use_reentrant=False)
            return self.last(found.mean((2, 3)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 34, 34), torch.randint(2, (64,))
    of_run = task.Task(Again(), None, prefed.FederatedData([(x, y)]), torch.device("cpu"))
    try_out(of_run, prefed.FederatedData([(x, y)]))
    of_run.pooled = pooling.WORTH_IT  # as if the model pooled elsewhere, too
    of_run.gradient(x, y, 0)
    assert of_run.flat.gradient.abs().max() > 0
