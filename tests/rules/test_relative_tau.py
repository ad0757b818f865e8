"""A tau that is a share of the root mean square of sqrt(P). Its arithmetic against independent code
is in tests/algorithms/test_oracles.py."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import prefed
from prefed.core.layout import Layout
from prefed.rules import SHAPES, Covariance, Rule, rule
from prefed.rules.rule import mean_of_last
from tests.helpers.engine_runs import chain, same
from tests.helpers.problems import tiny_data

LAYOUT = Layout.of([("w", torch.zeros(4, 3)), ("b", torch.zeros(4))])
SHAPE_NAMES = ["diagonal", "full", "block", "kronecker"]


def steps(made: Rule, gradients: Tensor, layout: Layout = LAYOUT, lr: float = 0.1) -> Tensor:
    """The weights after a step along each gradient (steps, ..., d)."""
    w = torch.zeros_like(gradients[0])
    clients = len(w) if w.dim() == 2 else None
    state = {n: f.new(w, clients) for n, f in made.fields(layout).items()}
    fitted = made.fit(layout)
    for k, g in enumerate(gradients):
        fitted.apply(w, g.clone(), state, lr, k)
    return w


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_it_has_no_units(shape: str) -> None:
    """Gradients a thousand times as large make the same steps; a tau with units does not."""
    gradients = draw(5, LAYOUT.size)
    relative = SHAPES.get(shape)(tau_relative=0.3)
    torch.testing.assert_close(steps(relative, gradients), steps(relative, 1000 * gradients))
    plain = SHAPES.get(shape)(tau=0.3)
    assert not torch.allclose(steps(plain, gradients), steps(plain, 1000 * gradients), rtol=0.1)


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_each_client_of_a_block_has_its_own(shape: str) -> None:
    gradients = draw(5, 3, LAYOUT.size) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1).double()
    made = SHAPES.get(shape)(tau_relative=0.3, bias_correction=True)
    together = steps(made, gradients)
    for row in range(3):
        torch.testing.assert_close(together[row], steps(made, gradients[:, row]))


def test_the_mean_is_over_the_whole_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is cut into parts would have one mean for each."""
    gradients = draw(5, LAYOUT.size) * torch.linspace(1, 50, LAYOUT.size)
    made = Covariance(tau_relative=0.3)
    whole = steps(made, gradients)
    monkeypatch.setattr(rule, "BLOCK", 5)
    assert torch.equal(steps(made, gradients), whole)


def test_it_is_not_fused() -> None:
    w = torch.zeros(4)
    assert type(Covariance().fused(w)) is not Covariance
    assert type(Covariance(tau_relative=0.1).fused(w)) is Covariance


@pytest.mark.parametrize("size", [100, 1 << 14, (1 << 14) + 1, 200_000])
def test_the_mean_has_the_same_bits_for_any_number_of_threads(size: int) -> None:
    x, found = draw(size).float(), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [mean_of_last(x), mean_of_last(x[None])[0]]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert math.isclose(float(found[0]), float(x.double().mean()), abs_tol=1e-6)


ALGORITHMS: list[prefed.Algorithm] = [
    prefed.PreFed(client_lr=0.005, tau_relative=0.1),
    prefed.PreFed(client_lr=0.005, tau_relative=0.1, shape="kronecker", refresh=2),
    prefed.PreFed(client_lr=0.005, tau_relative=0.1, personal=("@last",), momentum="derived"),
    prefed.PreFedOpt(client_lr=0.05, tau_relative=0.1),
    prefed.FedPM(client_lr=0.005, tau_relative=0.1),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_engines(algorithm: prefed.Algorithm) -> None:
    options: dict[str, Any] = {"rounds": 5, "local_steps": 3, "clients_per_round": 4,
                               "batch_size": 4, "device": "cpu"}  # fmt: skip
    one, other = (
        prefed.simulate(algorithm, chain(), tiny_data(), engine=engine, **options)
        for engine in ("sequential", "vectorised")
    )
    same(one, other, 1e-9)
    if "adaptive_share" in one.history[-1]:  # most of sqrt(P) is above a tenth of its mean
        assert one.history[-1]["adaptive_share"] > 0.2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_the_compiled_engine_steps_aside() -> None:
    options: dict[str, Any] = {"rounds": 2, "local_steps": 3, "batch_size": 4, "device": "cpu"}
    one = prefed.simulate(ALGORITHMS[0], chain(), tiny_data(), engine="vectorised", **options)
    with pytest.warns(prefed.EngineWarning, match="not compiled: with tau_relative"):
        other = prefed.simulate(ALGORITHMS[0], chain(), tiny_data(), engine="compiled", **options)
    same(one, other, 0.0)


def test_it_is_written_if_it_is_used() -> None:
    assert "tau_relative" not in prefed.PreFed().model_dump()
    used = prefed.PreFedLite(tau_relative=0.1)
    assert prefed.PreFedLite(**used.model_dump()) == used
    pair = prefed.Pair(client={"name": "covariance", "tau_relative": 0.1})
    assert pair.model_dump()["client"] == {
        "name": "covariance", "shape": "diagonal", "tau_relative": 0.1
    }  # fmt: skip
    with pytest.raises(prefed.PrefedError, match=r"PreFed\.tau_relative: should be greater than 0"):
        prefed.PreFed(tau_relative=0)
